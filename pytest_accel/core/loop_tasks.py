"""Additions to asyncio: tasks that report their errors at once, futures whose errors need no waiter, and polls."""

from __future__ import annotations

from asyncio import Future, Task, get_running_loop, sleep
from collections.abc import Callable, Coroutine
from typing import Any

from pytest_accel.core.clock import monotonic


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
