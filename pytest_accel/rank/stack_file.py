"""The file to which faulthandler writes a rank's stacks. It has the last collective and asyncio's tasks, too.

The code of an async test that waits is on no thread's stack.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from mmap import mmap
from os import register_at_fork, write
from signal import siginterrupt, signal
from sys import modules
from types import CodeType, FrameType
from typing import IO, Any

from pytest_accel.core.frames import is_library
from pytest_accel.core.session_folder import LAST_PLACE_SIZE
from pytest_accel.core.signals import STACK_SIGNAL

_KINDS = (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await"))
"""The prefixes of attributes of coroutines, generators and async generators, and the attribute for what they await."""


def _write_tasks(file: IO[str], number: int, frame: FrameType | None) -> None:
    """Write the stacks of tasks with code of the suite to `file`, as faulthandler writes the stacks of threads.

    This is a handler of signals: the main thread runs `frame`. The test's task comes last, as the main thread does in
    a dump. No-op unless an event loop waits.
    """
    siginterrupt(number, False)  # faulthandler undoes this when it has called this handler before.
    asyncio: Any = modules.get("asyncio")  # Importing it takes long.
    with suppress(Exception):  # No event loop runs. No other error may fail the test, which may go on.
        if asyncio is None or asyncio.current_task() is not None:
            return  # The code of a running task is on the thread's stack.
        run = set()
        while frame is not None:
            run |= {value for value in frame.f_locals.values() if issubclass(type(value), asyncio.Task)}
            frame = frame.f_back
        # The plugin of anyio has a task for all fixtures and tests, which is older than the tasks that these create: by
        # default, the name of a task ends with its number.
        order = {task: (task not in run, len(task.get_name()), task.get_name()) for task in asyncio.all_tasks()}
        for task in sorted(order, key=order.__getitem__, reverse=True):
            frames = [(one.f_code, one.f_lineno) for one in _frames(task.get_coro())]
            if not all(is_library(code.co_filename) for code, _ in frames):
                lines = [f'  File "{code.co_filename}", line {at} in {code.co_name}' for code, at in reversed(frames)]
                head = f"\nThread {id(task):#018x} (task {task.get_name()}, most recent call first):"
                write(file.fileno(), "\n".join([head, *lines, ""]).encode(errors="replace"))


def _frames(awaited: object) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of the coroutines that it awaits, the innermost last."""
    while awaited is not None:
        kind, following = next((one for one in _KINDS if hasattr(awaited, f"{one[0]}_frame")), ("", ""))
        if (frame := getattr(awaited, f"{kind}_frame", None)) is None:
            return
        yield frame
        awaited = getattr(awaited, following)


class StackFile:
    """The file to which this rank writes its stacks on a signal; one for each rank, open until the process exits.

    Its first bytes, mapped into memory, have the place of the last collective: they outlive a process that SIGKILL
    ends. A rank that runs out of memory is killed without a stack. With this, its report says how far it had come.
    """

    def __init__(self, path: str) -> None:
        """Make the file `path`, and write the stacks on `STACK_SIGNAL` from now on."""
        self._file = open(path, "w+", encoding="utf-8")  # noqa: SIM115
        self._file.truncate(LAST_PLACE_SIZE)
        self._file.seek(LAST_PLACE_SIZE)
        self._place = mmap(self._file.fileno(), LAST_PLACE_SIZE)
        signal(STACK_SIGNAL, partial(_write_tasks, self._file))
        faulthandler.register(STACK_SIGNAL, file=self._file, all_threads=True, chain=True)
        siginterrupt(STACK_SIGNAL, False)  # The rank may go on: its system calls must not fail.

    def catch_crashes(self) -> None:
        """Write the stacks of a crash to this file, unless the user has disabled pytest's plugin for that."""
        if faulthandler.is_enabled():
            faulthandler.enable(self._file)
            # The crash of a process that the test has forked belongs to the output.
            register_at_fork(after_in_child=partial(faulthandler.enable, 2))

    def set_place(self, code: CodeType, line: int) -> None:
        """Set the place to the `line` of `code`, in the format of `python_stacks`."""
        text = f'Thread 0x0:\n  File "{code.co_filename}", line {line} in {code.co_name}\n\0'.encode()
        with suppress(IndexError):  # The path is too long.
            self._place[: len(text)] = text

    def clear_place(self) -> None:
        """Forget the place, at the end of a test."""
        self._place[0] = 0
