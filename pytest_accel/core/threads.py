"""Start of the plugin's threads, also in suites that forbid their tests to start any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from threading import Thread

END_TIMEOUT = 60.0
"""Seconds within which a thread must end after it was told to. Longer than its own waits for processes together."""

# A conftest may have replaced `threading.Thread` before this module is imported. `Timer` derives from the original.
_Thread = cast("type[Thread]", threading.Timer.__base__)


class NoThreadError(RuntimeError):
    """This process cannot have more threads, or the suite has replaced `Thread.start` by a method that raises."""


def start(target: Callable[..., object], name: str, *args: Any) -> Thread:
    """Start and return a daemon thread that calls ``target(*args)``.

    Raise :class:`NoThreadError` if it does not start.
    """
    thread = _Thread(target=target, name=name, args=args, daemon=True)
    try:
        thread.start()
    except Exception as error:
        raise NoThreadError(f"this process cannot start a thread: {error}") from error
    return thread
