"""A fork server that imports torch and pytest's plugins before the session's settings are known.

If a conftest imports torch, the fork server would only then begin to import it, too. An early server does this at the
same time as the conftest. It becomes the session's fork server if that would be the same: if the current folder, all
variables that an import may read, and the limits and settings that a new process inherits are unchanged, and no new
folder of ``sys.path`` has other modules than those it has imported. Otherwise a new server takes its place.
"""

from __future__ import annotations

import gc
import importlib.machinery
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from os import getpid
from socket import socket
from typing import TYPE_CHECKING

from pytest_accel.compat.torch_variables import is_read_later
from pytest_accel.core import session_folder
from pytest_accel.core.interpreter import unmeasured
from pytest_accel.core.kill import KILL_TIMEOUT, MARK
from pytest_accel.core.launcher_env import for_own_ranks
from pytest_accel.core.paths import current_folder
from pytest_accel.forkserver.server_client import OwnServer, ServerProcess, spawn_here, start_python
from pytest_accel.forkserver.server_messages import Serve, file_with, read_file
from pytest_accel.messages import fd_passing, unix_sockets
from pytest_accel.messages.unix_sockets import Connection

if TYPE_CHECKING:
    from pytest_accel.messages.session_spec import SessionSpec


class EarlyServer:
    """The controller's early server. It ends with the controller, or at :meth:`close` if the session did not use it."""

    def __init__(self, plugin_options: tuple[str, ...]) -> None:
        """Start the process. `plugin_options` say which plugins pytest loads (`SessionSpec.plugin_options`)."""
        self.directory = session_folder.create()
        """The session's folder."""
        self._plugin_options = plugin_options
        self._state = _state()
        self._user = _user()
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

    @property
    def is_of_this_user(self) -> bool:
        """True unless this process has changed its user since, as a conftest of a server's suite does.

        Otherwise the session can use neither the process, whose ranks would be those of the first user, nor the folder.
        """
        return self._user == _user()

    def spawn(self, spec: SessionSpec, end: socket) -> ServerProcess:
        """Have the process become the fork server for `spec`, or start another one (`server_client.Spawn`)."""
        server, self._server = self._server, None
        if server is None:
            return spawn_here(spec, end)
        if (spec.plugin_options, _state()) == (self._plugin_options, self._state):
            environment = unmeasured(for_own_ranks(os.environ))
            begin = Serve(spec, self._controller, self._controller, environment)
            # Raises OSError if the process has ended, or if too many files are open.
            with suppress(OSError), file_with(begin, self.directory) as given:
                fd_passing.send(self._connection, [end.fileno(), given.fileno()])
                return server
        server.kill_tree()
        server.wait(KILL_TIMEOUT)
        return spawn_here(spec, end)

    def close(self) -> None:
        """End the process, and remove the session's folder, unless the session has used them."""
        server, self._server = self._server, None
        if getpid() != self._controller:
            return
        if server is not None:
            server.kill_tree()
        # Not before: the process ends with its connection, and removes the folder, which the session may use. A session
        # that has given up root's rights cannot kill it, and relies on that.
        self._connection.close()
        if server is not None:
            server.wait(KILL_TIMEOUT)
            session_folder.remove(self.directory)


def _user() -> tuple[int, ...]:
    return os.getuid(), os.geteuid(), os.getgid(), os.getegid(), *sorted(os.getgroups())


def _state() -> tuple[object, ...]:
    """Return what a new process inherits: its ranks have it, and its imports may depend on it.

    torch itself sets a variable that is read later, `CUDA_MODULE_LOADING`, when a conftest initialises CUDA.
    """
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    return (
        {name: value for name, value in os.environ.items() if not is_read_later(name)},
        current_folder(),
        _umask(),
        limits,
        (os.sched_getaffinity(0), os.sched_getscheduler(0)) if sys.platform == "linux" else None,
        os.getpriority(os.PRIO_PROCESS, 0),
        [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
    )


def _umask() -> int:
    """Return the mask of new files. It is read by setting one; other threads get no file that others may read."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


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
    with connection, server.ending_with(controller, descriptor, directory):
        known, threads = frozenset(sys.modules), preload.thread_count()
        with preload.blas_without_threads():
            preload.import_installed((*preload.RANK_MODULES, *preload.TORCH_MODULES))
            with suppress(BaseException):  # The fork server loads them again, and reports the error.
                preload.load_plugins(os.sep, plugin_options)
        fit = preload.unfit(known, threads) is None
        try:
            end, given = fd_passing.receive(connection, 2)
        except EOFError:
            # The controller has died, or cannot kill this process. The timer notices both.
            while True:
                signal.pause()
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
