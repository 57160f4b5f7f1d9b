"""The controller's client of the fork server: starts it, exchanges messages with it, and notices its exit."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from traceback import format_exc
from typing import Protocol

from pytest_accel.core import session_folder
from pytest_accel.core.clock import PAUSES, monotonic
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.kill import MARK, kill_tree, mark
from pytest_accel.core.paths import server_log_path
from pytest_accel.core.server_messages import StartWorld
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.rank.coverage import unmeasured

_STOP_TIMEOUT = 10.0
"""Seconds that a stopped server has to exit before it is killed."""
_TICK_INTERVAL = 1.0
"""Seconds between two calls of `ServerCallbacks.on_tick`."""


class ServerProcess(Protocol):
    """The process of a fork server, which may be the child of another process."""

    @property
    def loss(self) -> str | None:
        """The name of its node, and why this counts as lost; None if it does not."""

    def kill(self) -> None:
        """Kill the process."""

    def kill_tree(self) -> None:
        """Kill the process and all its descendants."""

    def wait(self, timeout: float | None) -> bool:
        """Return True once the process has exited, False after `timeout` seconds. None: wait without a limit."""


Spawn = Callable[[SessionSpec, socket.socket], ServerProcess]
"""Function that starts a fork server for a session, given the server's end of a connection, which the caller closes."""


class OwnServer:
    """A fork server that is a child of this process."""

    loss = None

    def __init__(self, spec: SessionSpec, end: socket.socket, environment: Mapping[str, str]) -> None:
        """Start the server with `environment`; it serves on the socket `end`."""
        source = f"from pytest_accel.forkserver.server import main; main({end.fileno()}, {os.getpid()}, {os.getpid()})"
        with open(server_log_path(spec.directory, spec.server), "wb") as log, tempfile.TemporaryFile() as given:
            given.write(pickle.dumps(spec))
            given.seek(0)
            self.process = subprocess.Popen(
                python_command(source, path=spec.sys_path),
                pass_fds=[end.fileno()],
                stdin=given,
                stdout=log,
                stderr=log,
                env={**unmeasured(environment), MARK: mark(spec.directory, spec.server)},
                start_new_session=True,  # Ctrl-C at the terminal must interrupt the driver only.
            )

    def kill(self) -> None:
        self.process.kill()

    def kill_tree(self) -> None:
        kill_tree(self.process.pid)

    def wait(self, timeout: float | None) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
            return True
        return False


def spawn_here(spec: SessionSpec, end: socket.socket) -> ServerProcess:
    """Start a fork server as a child of this process, with its environment."""
    return OwnServer(spec, end, os.environ)


@dataclass(frozen=True, slots=True)
class ServerCallbacks:
    """The callbacks of fork servers. They are called in threads of the servers' clients."""

    on_message: Callable[[object], None]
    """Called with each message of a fork server."""
    on_end: Callable[[int, str | None], None]
    """Called once a fork server has exited, whatever the cause, with its number and `ServerProcess.loss`."""
    on_tick: Callable[[], None]
    """Called about once a second."""
    on_failure: Callable[[str], None]
    """Called with the traceback if another callback has raised. The thread ends and handles no further messages."""


class ForkServerClient:
    """A running fork server, started by this object."""

    def __init__(self, spec: SessionSpec, callbacks: ServerCallbacks, spawn: Spawn = spawn_here) -> None:
        session_folder.ensure(spec.directory)
        ours, theirs = socket.socketpair()
        ours.setblocking(True)  # Tests may have set a default timeout for sockets.
        theirs.setblocking(True)
        with theirs:
            self._process = spawn(spec, theirs)
        self._connection = Connection(ours.detach())
        self._spec = spec
        self._used = False
        self._sending = threading.Lock()
        self._callbacks = callbacks
        self._thread = threading.Thread(target=self._listen, name="accel-starter", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Send `message`. Never raise: if the server has exited, `on_end` is called."""
        with self._sending, contextlib.suppress(OSError):
            self._used = self._used or isinstance(message, StartWorld)
            self._connection.send(message)

    def kill(self) -> None:
        """Kill the server. `on_end` is called as soon as it has exited."""
        self._process.kill()

    def stop(self) -> None:
        """Stop the server, which kills all its descendants, and wait for its exit."""
        if not self._used:
            self._process.kill_tree()  # The server may still be importing; do not wait for that.
        # Not close(): the thread may be waiting on the descriptor.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        if not self._process.wait(_STOP_TIMEOUT):
            self._process.kill()
            self._process.wait(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        try:
            self._receive_messages()
        except BaseException:
            self._callbacks.on_failure(
                f"the thread that listens to the fork server has ended with an error:\n{format_exc()}"
            )

    def _receive_messages(self) -> None:
        tick = monotonic() + _TICK_INTERVAL
        while True:
            try:
                arrived = self._connection.poll(max(0.0, tick - monotonic()))
                message = self._connection.recv() if arrived else None
            except (EOFError, OSError):
                break
            if arrived:
                self._callbacks.on_message(message)
            PAUSES.notice(tick)
            if monotonic() >= tick:
                self._callbacks.on_tick()
                tick = monotonic() + _TICK_INTERVAL
        self._process.wait(None)
        self._callbacks.on_end(self._spec.server, self._process.loss)
