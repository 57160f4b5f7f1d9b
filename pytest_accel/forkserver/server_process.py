"""The processes of fork servers, as the process that starts them sees them.

A fork server starts in two steps. In the first it imports torch and pytest's plugins. In the second it gets the
session's settings and serves. So the first server of a session can import at the same time as the session's conftests,
which often import torch, too (:class:`EarlyServer`): a session of one such test has its result seconds earlier.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import getpid
from socket import socket
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Protocol

from pytest_accel.compat.torch_variables import is_read_later
from pytest_accel.core import session_folder
from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.launcher_env import for_own_ranks
from pytest_accel.core.processes import KILL_TIMEOUT, MARK, kill_tree, mark
from pytest_accel.core.session_folder import current_folder, server_log_path
from pytest_accel.forkserver.server_messages import FirstStep, Serve, file_with
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.unix_sockets import Connection


class ServerProcess(Protocol):
    """The process of a fork server, which may be the child of another process."""

    @property
    def remote(self) -> bool:
        """True if it is on another machine, to which no open file can be passed."""

    @property
    def loss(self) -> str | None:
        """The name of its machine, and why this counts as lost; None if it does not."""

    def kill(self) -> None:
        """Kill the process and all its descendants; no-op if it has exited, or belongs to another user."""

    def wait(self, timeout: float) -> bool:
        """Return True once the process has exited, False after `timeout` seconds."""


Spawn = Callable[[SessionSpec, socket], ServerProcess]
"""Function that starts a fork server for a session, given the server's end of a connection, which the caller closes."""


class OwnServer:
    """A fork server that is a child of this process. It imports what ranks need, and waits for :meth:`serve`."""

    loss = None
    remote = False

    def __init__(self, first: FirstStep, environment: Mapping[str, str], path: Sequence[str]) -> None:
        """Start the process with `environment`, and with `path` as its ``sys.path``. Its output goes to its log."""
        ours, theirs = unix_sockets.pair()
        # Open as long as this object: the process ends if its end is closed during the first step.
        self._connection = Connection(ours.detach())
        with theirs, open(server_log_path(first.directory, first.server), "wb") as log:
            source = f"from pytest_accel.forkserver.server import main; main({theirs.fileno()}, {tuple(first)!r})"
            self.process = Popen(
                python_command(source, path=path),
                pass_fds=[theirs.fileno()],
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=_for_server(environment, first.directory, first.server),
                start_new_session=True,  # Ctrl-C at the terminal must interrupt the driver only.
            )

    def serve(self, spec: SessionSpec, end: socket, environment: Mapping[str, str] | None = None) -> None:
        """Have the process take on `environment`, and serve on the socket `end`; raise OSError if that is impossible.

        The process has ended then, or too many files are open.
        """
        changed = None if environment is None else _for_server(environment, spec.directory, spec.server)
        with file_with(Serve(spec, getpid(), changed), spec.directory) as given:
            unix_sockets.send_descriptors(self._connection, [end.fileno(), given.fileno()])

    def kill(self) -> None:
        if self.process.poll() is None:
            kill_tree(self.process.pid)
        # A session that has given up root's rights cannot kill the process, which exits now if it waits for `serve`.
        self._connection.close()

    def wait(self, timeout: float | None) -> bool:
        with suppress(TimeoutExpired):
            self.process.wait(timeout)
            return True
        return False


def first_step(spec: SessionSpec) -> FirstStep:
    """Return the first step of the fork server that serves `spec`."""
    return FirstStep(spec.directory, spec.server, spec.own_folder, spec.plugin_options)


def spawn_here(spec: SessionSpec, end: socket) -> OwnServer:
    """Start a fork server as a child of this process, which serves `spec` on the socket `end` (`Spawn`)."""
    server = OwnServer(first_step(spec), os.environ, spec.sys_path)
    with suppress(ConnectionError):  # It has ended, and so `end` is closed, which the caller notices.
        server.serve(spec, end)
    return server


class EarlyServer:
    """The first fork server of a session, and the session's folder, before the session's settings are known.

    Owned by the controller. If what the process has inherited is out of date when the settings are known, a new
    process takes its place.
    """

    def __init__(self, plugin_options: tuple[str, ...]) -> None:
        """Start the process. `plugin_options` say which plugins pytest loads (`SessionSpec.plugin_options`)."""
        self.directory = session_folder.create()
        self._inherited = (plugin_options, _inherited())
        self._controller = getpid()
        first = FirstStep(self.directory, 0, self.directory, plugin_options)
        self._server: OwnServer | None = OwnServer(first, os.environ, sys.path)
        """None once the session has started its fork server."""

    def spawn(self, spec: SessionSpec, end: socket) -> ServerProcess:
        """Have the process serve `spec`, and return it; or start and return a new process (`Spawn`)."""
        server, self._server = self._server, None
        if server is None:
            return spawn_here(spec, end)
        if self._inherited == (spec.plugin_options, _inherited()):
            with suppress(OSError):
                server.serve(spec, end, os.environ)
                return server
        server.kill()
        server.wait(KILL_TIMEOUT)
        return spawn_here(spec, end)

    def close(self) -> None:
        """End the process, and remove the session's folder, unless the session has used them."""
        server, self._server = self._server, None
        if server is None or getpid() != self._controller:
            return
        server.kill()
        server.wait(KILL_TIMEOUT)
        session_folder.remove(self.directory)


def _for_server(environment: Mapping[str, str], directory: str, server: int) -> dict[str, str]:
    """Return the environment for a fork server that is made from `environment`, this process's."""
    return {**unmeasured(for_own_ranks(environment)), MARK: mark(directory, server)}


def _inherited() -> tuple[object, ...]:
    """Return the settings that a new process inherits: its ranks have them, and its imports may depend on them."""
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    return (
        # torch itself sets a variable that is read later, `CUDA_MODULE_LOADING`, when a conftest initialises CUDA.
        {name: value for name, value in os.environ.items() if not is_read_later(name)},
        current_folder(),
        (os.getuid(), os.geteuid(), os.getgid(), os.getegid(), *sorted(os.getgroups())),
        _umask(),
        limits,
        (os.sched_getaffinity(0), os.sched_getscheduler(0)) if sys.platform == "linux" else None,
        os.getpriority(os.PRIO_PROCESS, 0),
        [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN],
    )


def _umask() -> int:
    """Return the mask of new files. To read it, set a mask with which other threads make no file readable to others."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
