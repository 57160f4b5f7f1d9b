"""The controller's end of the fork server: starts it, speaks to it, and sees it end."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from traceback import format_exc
from typing import Protocol

from pytest_accel.core.fd_passing import send as send_descriptors
from pytest_accel.core.folder_trust import ensure_own_folder
from pytest_accel.core.kill import MARK, kill_tree
from pytest_accel.core.messages import SessionSpec, StartWorld
from pytest_accel.core.paths import server_log_path
from pytest_accel.rank.coverage import unmeasured

_END_PATIENCE = 10.0


class ServerProcess(Protocol):
    """The process of a fork server, which may be another process's child."""

    lost: bool
    """Whether its machine has been cut off."""

    def kill(self) -> None:
        """End it at once."""

    def kill_tree(self) -> None:
        """End it at once, and all that came from it."""

    def wait(self, patience: float | None) -> bool:
        """Whether it has ended, within `patience` seconds; None: as long as it takes."""


Spawn = Callable[[SessionSpec, socket.socket], ServerProcess]
"""Starts a fork server that serves a session on its end of a connection. The socket is the caller's to close."""


class OwnServer:
    """A fork server that is this process's child."""

    lost = False

    def __init__(self, spec: SessionSpec, end: socket.socket, environment: Mapping[str, str]) -> None:
        source = f"from pytest_accel.forkserver.server import main; main({end.fileno()}, {os.getpid()})"
        with open(server_log_path(spec.directory, spec.server), "wb") as log, tempfile.TemporaryFile() as given:
            given.write(pickle.dumps(spec))
            given.seek(0)
            self.process = subprocess.Popen(
                interpreter(spec, source),
                pass_fds=[end.fileno()],
                stdin=given,
                stdout=log,
                stderr=log,
                env={**unmeasured(environment), MARK: spec.directory},
                start_new_session=True,  # A Ctrl-C at the terminal is the driver's to hear.
            )

    def kill(self) -> None:
        self.process.kill()

    def kill_tree(self) -> None:
        kill_tree(self.process.pid)

    def wait(self, patience: float | None) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
            return True
        return False


def interpreter(spec: SessionSpec, source: str) -> list[str]:
    """The command that runs `source` in a Python like this one, with the session's path."""
    # `subprocess` keeps its function for handing on -W, -X and the like to itself; multiprocessing uses it too.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", f"import sys; sys.path[:] = {list(spec.sys_path)!r}\n{source}"]


def spawn_here(spec: SessionSpec, end: socket.socket) -> ServerProcess:
    """A fork server in this process's environment."""
    return OwnServer(spec, end, os.environ)


class Starter:
    """A running fork server.

    `on_event` gets each of its messages, and `on_end` its end, whatever the cause; both in this object's thread. Where
    one of them raises, the thread ends, and `on_failure` gets the traceback: nobody listens to the server from then on.
    """

    def __init__(
        self,
        spec: SessionSpec,
        on_event: Callable[[object], None],
        on_end: Callable[[], None],
        on_tick: Callable[[], None],
        on_failure: Callable[[str], None],
        spawn: Spawn = spawn_here,
    ) -> None:
        ensure_own_folder(spec.directory)  # A server that has crashed has removed it.
        ours, theirs = socket.socketpair()
        ours.setblocking(True)  # Whatever default timeout the tests have set.
        theirs.setblocking(True)
        with theirs:
            self._process = spawn(spec, theirs)
        self._connection = Connection(ours.detach())
        self._number = spec.server
        self._used = False
        self._sending = threading.Lock()
        self._callbacks = (on_event, on_end, on_tick)
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._listen, name="accel-starter", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> frozenset[int]:
        """Its number where its machine has been cut off."""
        return frozenset({self._number} if self._process.lost else ())

    def send(self, message: object, descriptors: Sequence[int] = ()) -> None:
        """Raises nothing: where the server has ended, `on_end` says so. `descriptors` go with the message."""
        with self._sending, contextlib.suppress(OSError):
            self._used = self._used or isinstance(message, StartWorld)
            self._connection.send(message)
            if descriptors:
                send_descriptors(self._connection, descriptors)

    def kill(self) -> None:
        """End a server that does not answer; `on_end` follows."""
        self._process.kill()

    def stop(self) -> None:
        """End the server, which ends every process that came from it."""
        if not self._used:
            self._process.kill_tree()  # It may still be importing, which nobody needs to wait for.
        # Not close(): the thread may be waiting on the descriptor.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        if not self._process.wait(_END_PATIENCE):
            self._process.kill()
            self._process.wait(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        try:
            self._attend()
        except BaseException:
            self._on_failure(f"the thread that listens to the fork server has ended with an error:\n{format_exc()}")

    def _attend(self) -> None:
        on_event, on_end, on_tick = self._callbacks
        while True:
            try:
                if not self._connection.poll(1.0):
                    on_tick()
                    continue
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            on_event(message)
        self._process.wait(None)
        on_end()
