"""Additions to asyncio: a loop that works in every suite, tasks that report their errors at once, futures, polls."""

from __future__ import annotations

from asyncio import Future, SelectorEventLoop, Task, get_running_loop, sleep
from collections.abc import Callable, Coroutine
from selectors import DefaultSelector
from typing import Any

from pytest_accel.core.clock import monotonic
from pytest_accel.messages import unix_sockets


class GuardedLoop(SelectorEventLoop):
    """An event loop whose time no suite can stop, and whose sockets no suite can forbid.

    `BaseEventLoop.time` looks up `time.monotonic`, which suites freeze, and `BaseSelectorEventLoop._make_self_pipe`
    makes sockets of `socket.socket`, which suites replace to forbid tests the network. asyncio has no public way to
    replace them.
    """

    def __init__(self) -> None:
        super().__init__(DefaultSelector())

    def time(self) -> float:
        return monotonic()

    def _make_self_pipe(self) -> None:
        # If a future asyncio does not call this, a suite without sockets gets an error at its first marked test.
        loop: Any = self
        loop._ssock, loop._csock = unix_sockets.pair(blocking=False)
        loop._internal_fds += 1
        loop._add_reader(loop._ssock.fileno(), loop._read_from_self)


def start(work: Coroutine[Any, Any, None]) -> Task[None]:
    """Start a task of the running loop, and return it; its error goes to the loop's exception handler at once.

    The loop refers to its tasks only weakly, so the caller keeps the task. asyncio itself reports an error only when
    the task is deleted.
    """
    task = get_running_loop().create_task(work)
    task.add_done_callback(_report)
    return task


def fail(future: Future[Any], error: Exception) -> None:
    """End a future with an error unless it has ended; nobody need await it.

    Its waiter may be cancelled at the same moment. asyncio would then report a lost error.
    """
    if not future.done():
        future.set_exception(error)
        future.exception()


async def becomes_true(look: Callable[[], bool], seconds: float, interval: float) -> bool:
    """Call `look` every `interval` seconds until it returns True; return False after `seconds`."""
    deadline = monotonic() + seconds
    while not look():
        if monotonic() >= deadline:
            return False
        await sleep(interval)
    return True


def _report(task: Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": str(error), "exception": error})
