"""Tasks of asyncio whose errors do not get lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task of the running loop, and return it; its error goes to the loop's exception handler at once.

    The loop refers to its tasks only weakly, so the caller keeps the task. asyncio itself reports an error only when
    the task is deleted.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": str(error), "exception": error})
