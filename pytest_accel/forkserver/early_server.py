"""A fork server that imports torch and pytest's plugins before the session's settings are known.

If a conftest imports torch, the fork server would only then begin to import it, too. An early server does this at the
same time as the conftest. It becomes the session's fork server if that would import the same: if the current folder and
all variables that an import may read are unchanged, and no new folder of ``sys.path`` has other modules than those it
has imported. Otherwise a server that has not imported anything takes its place.
"""

from __future__ import annotations

import gc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from os import getpid
from socket import socket
from typing import TYPE_CHECKING

from pytest_accel.core import fd_passing, session_folder, unix_sockets
from pytest_accel.core.interpreter import unmeasured
from pytest_accel.core.kill import MARK
from pytest_accel.core.launcher_env import for_own_ranks
from pytest_accel.core.torch_variables import is_read_later
from pytest_accel.forkserver.server_client import OwnServer, ServerProcess, spawn_here, start_python
from pytest_accel.forkserver.server_messages import Serve, file_with, read_file

if TYPE_CHECKING:
    from pytest_accel.core.session_spec import SessionSpec


class EarlyServer:
    """The controller's early server. It ends with the controller, or at :meth:`close` if the session did not use it."""

    def __init__(self, plugin_options: tuple[str, ...]) -> None:
        """Start the process. `plugin_options` say which plugins pytest loads (`SessionSpec.plugin_options`)."""
        self.directory = session_folder.create()
        """The session's folder."""
        self._plugin_options = plugin_options
        self._state = _state()
        self._controller = getpid()
        ours, theirs = unix_sockets.pair()
        with theirs:
            source = (
                "from pytest_accel.forkserver.early_server import main; "
                f"main({theirs.fileno()}, {self.directory!r}, {self._controller}, {plugin_options!r})"
            )
            process = start_python(source, self.directory, 0, os.environ, sys.path, [theirs.fileno()])
        self._connection = Connection(ours.detach())
        self._server: OwnServer | None = OwnServer(process)
        """None once the session has started its fork server."""

    def spawn(self, spec: SessionSpec, end: socket) -> ServerProcess:
        """Have the process become the fork server for `spec`, or start another one (`server_client.Spawn`)."""
        server, self._server = self._server, None
        if server is None:
            return spawn_here(spec, end)
        with self._connection:
            if (spec.plugin_options, _state()) == (self._plugin_options, self._state):
                environment = unmeasured(for_own_ranks(os.environ))
                begin = Serve(spec, self._controller, self._controller, environment)
                # Raises OSError if the process has ended, or if too many files are open.
                with suppress(OSError), file_with(begin, self.directory) as given:
                    fd_passing.send(self._connection, [end.fileno(), given.fileno()])
                    return server
        _end(server)
        return spawn_here(spec, end)

    def close(self) -> None:
        """End the process, and remove the session's folder, unless the session has used them."""
        server, self._server = self._server, None
        if server is not None and getpid() == self._controller:
            self._connection.close()
            _end(server)
            session_folder.remove(self.directory)


def _state() -> tuple[Mapping[str, str], str]:
    """Return what a new process inherits and its imports may depend on: the environment and the current folder.

    torch itself sets a variable that is read later, `CUDA_MODULE_LOADING`, when a conftest initialises CUDA.
    """
    environment = {name: value for name, value in os.environ.items() if not is_read_later(name)}
    try:
        return environment, os.getcwd()
    except OSError:  # The folder has been removed.
        return environment, ""


def _end(server: OwnServer) -> None:
    server.kill_tree()
    server.wait(None)


def main(descriptor: int, directory: str, controller: int, plugin_options: tuple[str, ...]) -> None:
    """Import torch and the plugins, and serve.

    The controller passes the socket on which the fork server serves, and the file with its :class:`Serve`, over the
    socket `descriptor`.
    """
    from pytest_accel.core import log
    from pytest_accel.forkserver import preload, server

    connection = Connection(descriptor)
    session_folder.claim(directory)
    log.start_here("fork server 0")
    log.step("starts early; its parent is process %d", controller)
    gc.disable()  # As in the fork server.
    path = tuple(sys.path)
    with server.ending_with(controller, directory):
        known, threads = frozenset(sys.modules), preload.thread_count()
        with preload.blas_without_threads():
            preload.import_installed((*preload.RANK_MODULES, *preload.TORCH_MODULES))
            with suppress(BaseException):  # The fork server loads them again, and reports the error.
                preload.load_plugins(os.sep, plugin_options)
        fit = preload.unfit(known, threads) is None
        try:
            end, given = fd_passing.receive(connection, 2)
        except EOFError:
            # A living controller kills this process, and may still use the folder. The timer notices if it has died.
            while True:
                signal.pause()
        connection.close()
        begin: Serve = read_file(given)
        environment = begin.environment or {}
        os.environ.update(environment)
        for name in os.environ.keys() - environment.keys() - {MARK}:
            del os.environ[name]
    if not fit or _has_other_modules([entry for entry in begin.spec.sys_path if entry not in path]):
        server.start_anew(end, begin)
    sys.path[:] = begin.spec.sys_path
    server.serve(end, begin)


def _has_other_modules(path: Sequence[str]) -> bool:
    """Return whether the folders `path` have modules that replace modules which this process has imported."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." not in name and spec is not None and spec.has_location:
            found = importlib.machinery.PathFinder.find_spec(name, path)
            if found is not None and found.origin != spec.origin:
                return True
    return False
