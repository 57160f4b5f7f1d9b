"""The native frames of ranks that do not come to an end, through py-spy, if it is installed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from pytest_accel.core.clock import monotonic
from pytest_accel.core.programs import find_program

_PATIENCE = 15.0
"""Seconds for all ranks: py-spy reads the symbols of every library that a process has loaded."""
_THREAD = re.compile(r"^(?=Thread )", re.MULTILINE)
_LONGEST = 160
"""Characters of a line that are kept: a template of C++ has thousands."""
_AROUND_A_TEST = re.compile(r"^ +.*\((?:_pytest|pluggy)/", re.MULTILINE)


def native_frames(pids: Mapping[int, int]) -> dict[int, str]:
    """By rank, Python's and native frames of its threads, innermost first, down to the test; those that can be had.

    Without the right to trace its own processes (ptrace(2), ``kernel.yama.ptrace_scope``) a user gets none.
    """
    command = find_program("py-spy")
    found: dict[int, str] = {}
    deadline = monotonic() + _PATIENCE
    for rank, pid in pids.items() if command is not None else ():
        assert command is not None
        try:
            dump = subprocess.run(
                [command, "dump", "--native", "--pid", str(pid)],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=max(0.0, deadline - monotonic()),
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if text := shorten(dump.stdout):
            found[rank] = text
    return found


def shorten(dump: str) -> str:
    """The threads of a py-spy `dump`, each down to where pytest calls the test, without those that are all pytest's."""
    threads = []
    for thread in _THREAD.split(dump)[1:]:
        around = _AROUND_A_TEST.search(thread)
        lines = (thread[: around.start()] if around else thread).rstrip().splitlines()
        if len(lines) > 1 and not any("rank/flight_recorder.py" in line for line in lines):
            threads += [line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…" for line in lines]
    return "\n".join(threads)
