"""Fork servers without processes, for tests of their clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.forkserver.server_client import ServerCallbacks


class FakeServer:
    """A fork server whose messages the test sends, over `connection`."""

    loss = None
    connection: Connection

    def __init__(self) -> None:
        self.on_kill_tree: Callable[[], None] = lambda: None
        """Called when the client is stopped, if the server has not been asked to start a world."""

    def spawn(self, spec: SessionSpec, end: socket.socket) -> FakeServer:
        self.connection = Connection(end.dup().detach())
        return self

    def kill(self) -> None:
        pass

    def kill_tree(self) -> None:
        self.on_kill_tree()

    def wait(self, timeout: float | None) -> bool:
        return True


class Calls:
    """The calls of the callbacks of fork servers."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.ends: list[int] = []
        self.failures: list[str] = []
        self.changed = threading.Event()
        """Set after each message, end and failure."""
        self.callbacks = ServerCallbacks(self._add_message, self._add_end, lambda: None, self._add_failure)

    def _add_message(self, message: object) -> None:
        self.messages.append(message)
        self.changed.set()

    def _add_end(self, number: int, loss: str | None) -> None:
        self.ends.append(number)
        self.changed.set()

    def _add_failure(self, why: str) -> None:
        self.failures.append(why)
        self.changed.set()


def session(directory: str) -> SessionSpec:
    """Return a session with the folder `directory`."""
    return SessionSpec((), "/", (), directory, "/", (), (), (), (), (), False)
