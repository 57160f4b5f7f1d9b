"""The controller's client of the fork server: starts it, exchanges messages with it, and notices its exit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from os import getpid
from pickle import dumps
from socket import SHUT_RDWR, socket
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryFile
from threading import Lock, Thread, current_thread
from traceback import format_exc
from typing import IO, Protocol

from pytest_accel.core import session_folder, unix_sockets
from pytest_accel.core.clock import PAUSES, monotonic
from pytest_accel.core.fd_passing import socket_of
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.kill import KILL_TIMEOUT, MARK, kill_tree, mark
from pytest_accel.core.paths import server_log_path
from pytest_accel.core.readable import is_readable
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

    def wait(self, timeout: float) -> bool:
        """Return True once the process has exited, False after `timeout` seconds."""


Spawn = Callable[[SessionSpec, socket], ServerProcess]
"""Function that starts a fork server for a session, given the server's end of a connection, which the caller closes."""


class OwnServer:
    """A fork server that is a child of this process."""

    loss = None

    def __init__(self, process: Popen[bytes]) -> None:
        self.process = process

    @classmethod
    def start(cls, spec: SessionSpec, end: socket, environment: Mapping[str, str]) -> OwnServer:
        """Start a server with `environment`; it serves on the socket `end`."""
        source = f"from pytest_accel.forkserver.server import main; main({end.fileno()}, {getpid()}, {getpid()})"
        with TemporaryFile() as given:
            given.write(dumps(spec))
            given.seek(0)
            return cls(start_python(source, spec.directory, spec.server, environment, spec.sys_path, end, given))

    def kill(self) -> None:
        self.process.kill()

    def kill_tree(self) -> None:
        kill_tree(self.process.pid)

    def wait(self, timeout: float | None) -> bool:
        with suppress(TimeoutExpired):
            self.process.wait(timeout)
            return True
        return False


def spawn_here(spec: SessionSpec, end: socket) -> ServerProcess:
    """Start a fork server as a child of this process, with its environment."""
    return OwnServer.start(spec, end, os.environ)


def start_python(
    source: str,
    directory: str,
    number: int,
    environment: Mapping[str, str],
    path: Sequence[str],
    end: socket,
    given: IO[bytes] | int,
) -> Popen[bytes]:
    """Start the process of fork server `number` of the session in `directory`, which runs `source`.

    The process inherits the socket `end`, and reads `given`, a file or `subprocess.DEVNULL`. `path` is its
    ``sys.path``. Its output goes to the server's log.
    """
    with open(server_log_path(directory, number), "wb") as log:
        return Popen(
            python_command(source, path=path),
            pass_fds=[end.fileno()],
            stdin=given,
            stdout=log,
            stderr=log,
            env={**unmeasured(environment), MARK: mark(directory, number)},
            start_new_session=True,  # Ctrl-C at the terminal must interrupt the driver only.
        )


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
        ours, theirs = unix_sockets.pair()
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            unix_sockets.limit_writes(ours)
            unix_sockets.limit_reads(ours, unix_sockets.WRITE_TIMEOUT)  # Only after a part of a message has arrived.
            self._process = spawn(spec, theirs)
            undo.pop_all()
        self._connection = Connection(ours.detach())
        self._spec = spec
        self._used = False
        self._sending = Lock()
        self._callbacks = callbacks
        self._thread = Thread(target=self._listen, name="accel-starter", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Send `message`. Never raise: if the server has exited, `on_end` is called."""
        with self._sending, suppress(OSError):
            self._used = self._used or isinstance(message, StartWorld)
            try:
                self._connection.send(message)
            except BlockingIOError:  # The server does not read, and may have got a part of the message.
                self._process.kill()

    def kill(self) -> None:
        """Kill the server. `on_end` is called as soon as it has exited."""
        self._process.kill()

    def stop(self) -> bool:
        """Stop the server, which kills all its descendants, and wait for its exit.

        Return False if it did not exit in time and was killed, so that its descendants may live on.
        """
        if not self._used:
            self._process.kill_tree()  # The server may still be importing; do not wait for that.
        # Not close(): the thread may be waiting on the descriptor.
        with suppress(OSError), socket_of(self._connection) as end:
            end.shutdown(SHUT_RDWR)
        exited = self._end_process()
        if current_thread() is not self._thread:
            self._thread.join()
        self._connection.close()
        return exited

    def _end_process(self) -> bool:
        """Wait for the exit of the server; kill it after `_STOP_TIMEOUT`, and return False then."""
        if self._process.wait(_STOP_TIMEOUT):
            return True
        self._process.kill()
        self._process.wait(KILL_TIMEOUT)
        return False

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
                arrived = is_readable(self._connection.fileno(), max(0.0, tick - monotonic()))
                PAUSES.notice(tick)  # Before the callbacks: while they run, this process is not paused.
                message = self._connection.recv() if arrived else None
            except (EOFError, OSError):
                break
            if arrived:
                self._callbacks.on_message(message)
            if monotonic() >= tick:
                self._callbacks.on_tick()
                tick = monotonic() + _TICK_INTERVAL
        self._end_process()
        self._callbacks.on_end(self._spec.server, self._process.loss)
