"""The controller's end of the fork server: starts it, speaks to it, and sees it end."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from pytest_accel.worlds.kill import MARK, kill_tree
from pytest_accel.worlds.messages import SessionSpec, StartWorld

_END_PATIENCE = 10.0


class Starter:
    """A running fork server.

    `on_event` gets each of its messages, and `on_end` its end, whatever the cause; both in this object's thread.
    """

    def __init__(
        self,
        spec: SessionSpec,
        on_event: Callable[[object], None],
        on_end: Callable[[], None],
        on_tick: Callable[[], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        source = (
            f"import sys; sys.path[:] = {list(spec.sys_path)!r}\n"
            f"from pytest_accel.worlds.forkserver import main; main({theirs.fileno()}, {os.getpid()})"
        )
        os.makedirs(spec.directory, mode=0o700, exist_ok=True)  # A server that has crashed has removed it.
        # `subprocess` keeps its function for handing on -W, -X and the like to itself; multiprocessing uses it too.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs, open(os.path.join(spec.directory, "server.log"), "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", source],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, MARK: spec.directory},
                start_new_session=True,  # A Ctrl-C at the terminal is the driver's to hear.
            )
        self._connection = Connection(ours.detach())
        self._used = False
        self._sending = threading.Lock()
        self._connection.send_bytes(pickle.dumps(spec))
        self._callbacks = (on_event, on_end, on_tick)
        self._thread = threading.Thread(target=self._listen, name="accel-starter", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Raises nothing: where the server has ended, `on_end` says so."""
        with self._sending, contextlib.suppress(OSError):
            self._used = self._used or isinstance(message, StartWorld)
            self._connection.send(message)

    def kill(self) -> None:
        """End a server that does not answer; `on_end` follows."""
        self._process.kill()

    def stop(self) -> None:
        """End the server, which ends every process that came from it."""
        if not self._used:
            kill_tree(self._process.pid)  # It may still be importing, which nobody needs to wait for.
        # Not close(): the thread may be waiting on the descriptor.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
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
        self._process.wait()
        on_end()
