"""Calls that other threads leave to the main thread of a process."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue


class MainThreadCalls:
    """Calls for the main thread of the controller, which makes them in their order when it waits for the pool.

    Under xdist, that is xdist's loop; otherwise it is the wait of a driver for a world. All that are left are made when
    the pool is closed.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.wake: Callable[[], None] = _wake_nobody
        """Has the main thread call :meth:`run` soon. Any thread may call this, also with locks held."""

    def add(self, call: Callable[[], None]) -> None:
        """Have the main thread make this call."""
        self._calls.put(call)
        self.wake()

    def run(self) -> None:
        """Make all calls that have been added. Only for the main thread, which must hold no lock."""
        while not self._calls.empty():
            self._calls.get_nowait()()


def _wake_nobody() -> None:
    """Wake nobody: the main thread does not wait."""
