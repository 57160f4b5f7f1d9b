"""The early start of the fork server, which imports torch at the same time as conftests are imported.

A session of one such test has its result seconds earlier. Without this feature, the fork server starts when the first
file with marks is collected.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.marks import MarkOwners, deselected_marks, marks_in
from pytest_accel.core.source_files import text_of
from pytest_accel.core.stash_keys import EARLY_SERVER
from pytest_accel.settings import options

if TYPE_CHECKING:
    from socket import socket

    from pytest_accel.forkserver.server_process import ServerProcess
    from pytest_accel.messages.session_spec import SessionSpec

_MOST_FILES = 50
"""Number of test files that are searched for marks; reading a file takes about 0.05 ms."""
_MOST_FOLDERS = 50
_RUN_NO_TESTS = (
    *("collectonly", "setupplan", "help", "version", "markers", "cacheshow", "showfixtures", "show_fixtures_per_test"),
    *("looponfail", options.PLAN, options.INFO),
)


@pytest.hookimpl(trylast=True)
def pytest_accel_start(early_config: pytest.Config) -> None:
    """Start an early fork server if the session seems to need it; the server ends with the session."""
    known = early_config.known_args_namespace
    # Not importlib.util.find_spec, which raises ValueError if sys.modules has a stub.
    if any(getattr(known, name, False) for name in _RUN_NO_TESTS) or PathFinder.find_spec("torch") is None:
        return
    marks = set().union(*map(marks_in, islice(_texts(early_config), _MOST_FILES)))
    marks -= deselected_marks(getattr(known, "markexpr", ""))
    if not marks:
        return
    config = copy.copy(early_config)
    config.option = known  # The options of conftests are missing; the session needs none of them here.
    try:
        settings = options.settings(config)
    except pytest.UsageError:
        return  # The session reports the error.
    # Conftests may register more marks.
    marks -= MarkOwners(lambda: early_config.getini("markers"), settings.marks).of_project
    if settings.preload == "none" or settings.cluster is not None:
        return
    if not marks or ("distributed" not in marks and not _has_devices(settings)):
        return
    # A conftest may replace functions of the standard library by functions that raise. The modules that run marked
    # tests bind the functions that they use when they are imported, so this comes first.
    from pytest_accel import item_redirection  # noqa: F401
    from pytest_accel.driver import driver  # noqa: F401
    from pytest_accel.pool import pool_client  # noqa: F401
    from pytest_accel.session_pool import plugin_options

    try:
        server = early_config.stash[EARLY_SERVER] = EarlyServer(plugin_options(config))
    except OSError:
        return  # The first test that needs the fork server reports the error.
    early_config.add_cleanup(server.close)


def _has_devices(settings: options.Settings) -> bool:
    """Return whether tests that only request devices would run."""
    with suppress(ValueError, pytest.UsageError):
        return bool(options.machine_for(settings).session.devices)
    return False


def _texts(config: pytest.Config) -> Iterator[str]:
    """Yield the texts of the first test files that pytest will collect."""
    known, patterns = config.known_args_namespace, config.getini("python_files")
    at_root = config.invocation_params.dir == config.rootpath  # pytest ignores `testpaths` elsewhere.
    named = known.file_or_dir or (config.getini("testpaths") if at_root else [])
    for argument in named or ["."]:
        top = config.invocation_params.dir / argument.partition("::")[0]
        for folder, folders, names in islice(os.walk(top), _MOST_FOLDERS):
            ignored = config.getini("norecursedirs")
            folders[:] = [name for name in folders if not any(fnmatch(name, pattern) for pattern in ignored)]
            # pytest collects no other files as Python modules, whatever the patterns say.
            modules = (name for name in names if name.endswith(".py"))
            yield from (
                text_of(Path(folder, name)) for name in modules if any(fnmatch(name, pattern) for pattern in patterns)
            )
        if top.suffix == ".py":
            yield text_of(top)


class EarlyServer:
    """The first fork server of a session, and the session's folder, before the session's settings are known.

    Owned by the controller. If the process has imported modules with other plugins or variables than those that the
    session has when its settings are known, a new process takes its place.
    """

    # The modules are imported in the methods, since most sessions need none of them.

    def __init__(self, plugin_options: tuple[str, ...]) -> None:
        """Start the process. `plugin_options` say which plugins pytest loads (`SessionSpec.plugin_options`)."""
        from pytest_accel.core import session_folder
        from pytest_accel.forkserver.server_process import OwnServer

        self.directory = session_folder.create()
        self._began_with = plugin_options, _read_at_import()
        self._controller = os.getpid()
        self._server: OwnServer | None = OwnServer(self.directory, 0, plugin_options, sys.path)
        """None once the session has started its fork server."""

    def spawn(self, spec: SessionSpec) -> tuple[ServerProcess, socket]:
        """Have the process serve `spec`, or start a new process (`Spawn`)."""
        from pytest_accel.forkserver.server_process import serve, spawn_here

        server, self._server = self._server, None
        if server is not None and self._began_with == (spec.plugin_options, _read_at_import()):
            with suppress(OSError):
                serve(server.connection, spec, anew=True)
                return server, server.connection
        if server is not None:
            server.end()
        return spawn_here(spec)

    def close(self) -> None:
        """End the process, and remove the session's folder, unless the session has used them."""
        from pytest_accel.core import session_folder

        server, self._server = self._server, None
        if server is not None and os.getpid() == self._controller:
            server.end()
            session_folder.remove(self.directory)


def _read_at_import() -> dict[str, str]:
    """Return the variables of this process on which the imports of a server may depend."""
    from pytest_accel.compat.torch_variables import is_read_later

    # torch itself sets a variable that is read later, `CUDA_MODULE_LOADING`, when a conftest initialises CUDA.
    return {name: value for name, value in os.environ.items() if not is_read_later(name)}
