"""The native frames of ranks that hang, taken with py-spy if it is installed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from pytest_accel.core.clock import monotonic
from pytest_accel.core.programs import find_program
from pytest_accel.core.truncation import cut_end

_TIMEOUT = 15.0
"""Seconds for all ranks: py-spy reads the symbols of every library that a process has loaded."""
_THREAD = re.compile(r"^(?=Thread )", re.MULTILINE)
_LONGEST = 160
"""Maximum number of characters of a line; the name of a C++ template can have thousands."""
_AROUND_A_TEST = re.compile(r"^ +.*\((?:_pytest|pluggy)/", re.MULTILINE)


def native_frames(pids: Mapping[int, int]) -> dict[int, str]:
    """Return the Python and native frames of each rank's threads, innermost first, down to the test.

    Ranks that cannot be examined are left out: all of them if the user has no right to trace processes (ptrace(2),
    ``kernel.yama.ptrace_scope``).
    """
    command = find_program("py-spy")
    if command is None:
        return {}
    found: dict[int, str] = {}
    deadline = monotonic() + _TIMEOUT
    for rank, pid in pids.items():
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
    """Return the threads of a py-spy `dump`, each down to pytest's call of the test.

    Threads that run only pytest, and the flight recorder's thread, are left out.
    """
    threads = []
    for thread in _THREAD.split(dump)[1:]:
        around = _AROUND_A_TEST.search(thread)
        lines = (thread[: around.start()] if around else thread).rstrip().splitlines()
        if len(lines) > 1 and not any("rank/flight_recorder.py" in line for line in lines):
            threads += [cut_end(line, _LONGEST) for line in lines]
    return "\n".join(threads)
