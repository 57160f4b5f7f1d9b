"""The stacks of asyncio's tasks: the code of an async test that waits is on no thread's stack."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import FrameType
from typing import IO, Any

from pytest_accel.core.frames import is_library

_AWAITED = (("cr_frame", "cr_await"), ("gi_frame", "gi_yieldfrom"), ("ag_frame", "ag_await"))
"""The attributes of coroutines, generators and async generators: the frame, and what it awaits."""


def write(file: IO[str], frame: FrameType | None) -> None:
    """Write the stacks of tasks with code of the suite to `file`, as faulthandler does those of threads.

    The test's task comes last, where the main thread is in a dump. This does nothing unless an event loop waits in this
    thread, which runs `frame`: the code of a task that runs is on the thread's stack.
    """
    try:
        tasks = asyncio.all_tasks()
        if asyncio.current_task() is not None:
            return
    except RuntimeError:  # No event loop runs.
        return
    run: set[Any] = set()
    while frame is not None:
        run |= {value for value in frame.f_locals.values() if isinstance(value, asyncio.Task)}
        frame = frame.f_back
    # The plugin of anyio has a task for all fixtures and tests, which is older than the tasks that these create.
    for task in sorted(tasks, key=lambda task: (task in run, -_number(task))):
        frames = [(one.f_code, one.f_lineno) for one in _frames(task.get_coro())]
        if not all(is_library(code.co_filename) for code, _ in frames):
            lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in frames]
            head = f"\nThread {id(task):#018x} (task {task.get_name()}, most recent call first):"
            os.write(file.fileno(), "\n".join([head, *reversed(lines), ""]).encode(errors="replace"))


def _number(task: asyncio.Task[Any]) -> float:
    """Return the number in asyncio's name of a task, in the order of their creation; infinite for another name."""
    number = task.get_name().rpartition("-")[2]
    return int(number) if number.isdecimal() else float("inf")


def _frames(awaited: object) -> Iterator[FrameType]:
    """Return the frames of a coroutine and of those that it awaits, the innermost last."""
    while awaited is not None:
        frame, following = next((names for names in _AWAITED if hasattr(awaited, names[0])), ("", ""))
        if (found := getattr(awaited, frame, None)) is None:
            return
        yield found
        awaited = getattr(awaited, following)
