"""Imports in the fork server, made so that the server stays a process that may be forked."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from os import _exit

from pytest_accel.core import prctl
from pytest_accel.core.loaders import loads_plainly
from pytest_accel.core.metadata_cache import Installed
from pytest_accel.core.preload_discovery import UNFORKABLE, published_packages
from pytest_accel.core.server_messages import ServerNote
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.forkserver.preload import blas_without_threads, load_plugins, unfit
from pytest_accel.forkserver.server_exit import clean_up_processes, ending_with

_UNFIT = 3
"""Exit status of a preloading server from which ranks must not be forked."""


class Preloader:
    """Imports plugins and modules into the fork server, before it has forked ranks.

    The imports are made in a fork of the process, which then serves in its place if it may still be forked. If the
    imports start threads or a device runtime, the fork exits, and the original process continues to serve.
    """

    def __init__(
        self,
        session: SessionSpec,
        parent: int,
        always: frozenset[str],
        installed: Installed,
        send: Callable[[object], None],
    ) -> None:
        """`always` are the modules that every fork server imports: torch, pytest and their dependencies.

        `parent` is the parent of the process that this object is created in.
        """
        self.serving_pid = os.getpid()
        """Process id of the process that serves: the one that has created this object, or its fork."""
        self._session = session
        self._parent = parent
        self._always = always
        self._installed = installed
        self._send = send
        self._is_fork = False
        """True in the fork that imports and serves."""
        self._plugins_loaded = False

    def needs(self, modules: Sequence[str]) -> bool:
        """Return True if plugins or one of `modules` are still to be imported."""
        return not self._session.bare and (not self._plugins_loaded or bool(self._missing(modules)))

    def preload(self, modules: Sequence[str]) -> None:
        """Import the plugins, once, and `modules`. This process must have no ranks: they have to stay its children."""
        wanted = self._missing(modules)
        if self._is_fork:
            self._import_or_leave(wanted)
            return
        original = os.getpid()
        copy = os.fork()
        if copy == 0:
            prctl.die_with_parent(original)
            prctl.become_subreaper()
            self._is_fork, self.serving_pid = True, os.getpid()
            self._import_or_leave(wanted)
            return
        with ending_with(self._parent, self._session):
            status = _wait_for(copy)
        if status != _UNFIT:
            # The fork served until the controller exited, or it died together with its ranks. In the second case the
            # exit of this process makes the controller start a server that does not preload.
            clean_up_processes(self._session)
            _exit(0)

    def _missing(self, modules: Sequence[str]) -> list[str]:
        """Return those of `modules` that are still to be imported; add a note about those that must not be."""
        missing = []
        for name in modules:
            if (reason := UNFORKABLE.get(name.partition(".")[0])) is not None:
                self._send(ServerNote(f"preload: {name} is left out: {reason}"))
            elif name not in sys.modules:
                missing.append(name)
        return missing

    def imported_ahead(self, modules: Sequence[str]) -> str | None:
        """Return one of `modules` that was only imported to preload it, by Python's own loaders, or None."""
        for name in modules:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if spec is not None and name not in self._always and loads_plainly(spec):
                return name
        return None

    @blas_without_threads()
    def _import_or_leave(self, modules: Sequence[str]) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            named = self._session.plugins
            kept_out = [name for name in named if name.startswith("no:")]
            with self._installed.remembered():
                published_packages()  # Fills a cache for the ranks, which look up the plugins of installed packages.
                self._try("pytest's plugins", lambda: load_plugins(self._session.directory, kept_out))
                if len(named) > len(kept_out):
                    self._try("the plugins that -p names", lambda: load_plugins(self._session.directory, named))
        for name in modules:
            self._try(name, partial(importlib.import_module, name))

    def _try(self, name: str, load: Callable[[], object]) -> None:
        try:
            load()
        except BaseException as error:
            # Not an error here: a rank that needs the module reports the same error itself.
            self._send(ServerNote(f"preload: {name} could not be imported ({type(error).__name__}: {error})"))
        if (reason := unfit(self._always)) is not None:
            self._send(ServerNote(f"preload: ranks start without what is preloaded, since importing {name} {reason}"))
            _exit(_UNFIT)


def _wait_for(pid: int) -> int:
    while True:
        found, status = os.waitpid(-1, 0)
        if found == pid:
            return os.waitstatus_to_exitcode(status)
