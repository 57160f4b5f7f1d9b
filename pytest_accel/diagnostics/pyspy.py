"""The native frames of ranks that hang, taken with py-spy if it is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from subprocess import DEVNULL, SubprocessError, run

from pytest_accel.core.clock import monotonic
from pytest_accel.core.interpreter import find_program
from pytest_accel.core.truncation import cut_end

_TIMEOUT = 15.0
"""Seconds for all ranks: py-spy reads the symbols of every library that a process has loaded."""
_THREAD = re.compile(r"^(?=Thread )", re.MULTILINE)
_LONGEST = 160
"""Maximum number of characters of a line; the name of a C++ template can have thousands."""
_PYTHON_FRAME = re.compile(r"\(.*\.py:\d+\)$")
_SAYS_NOTHING = re.compile(r"^ +(?:0x[0-9a-f]+ \(|pybind11::)|\(pytest_accel/rank/.*\.py:\d+\)$")
"""Frames without a name, of the binding between C++ and Python, and of this package's methods in torch's place."""


def native_frames(pids: Mapping[int, int]) -> dict[int, str]:
    """Return the native frames of each rank's threads, innermost first, down to the first Python frame.

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
            dump = run(
                [command, "dump", "--native", "--pid", str(pid)],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                stdin=DEVNULL,
                timeout=max(0.0, deadline - monotonic()),
                check=True,
            )
        except (OSError, SubprocessError):
            continue
        if text := shorten(dump.stdout):
            found[rank] = text
    return found


def shorten(dump: str) -> str:
    """Return the native frames of the threads of a py-spy `dump`, each down to the Python frame that called them.

    Threads without native frames, and the flight recorder's thread, are left out.
    """
    threads = []
    for thread in _THREAD.split(dump)[1:]:
        heading, *every = thread.rstrip().splitlines()
        frames = [frame for frame in every if not _SAYS_NOTHING.search(frame)]
        python = next((at for at, frame in enumerate(frames) if _PYTHON_FRAME.search(frame)), len(frames))
        if python and not any("rank/flight_recorder.py" in frame for frame in every):
            threads += [cut_end(line, _LONGEST) for line in (heading, *frames[: python + 1])]
    return "\n".join(threads)
