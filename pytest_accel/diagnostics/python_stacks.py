"""The Python stacks of ranks, which ranks write to a file on a signal."""

from __future__ import annotations

import contextlib
import os
import re
import time

from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import LIBRARIES
from pytest_accel.rank import flight_recorder

_PYTEST_FOLDER = f"{os.sep}_pytest{os.sep}"
_FLIGHT_RECORDER = flight_recorder.__file__


def take_stacks(pids: dict[int, int], paths: dict[int, str], stack_signal: int, timeout: float = 1.0) -> dict[int, str]:
    """Return the Python stacks of all threads of the processes `pids`, by rank; empty for one that did not answer.

    The signal handler is faulthandler's, written in C: it does not need the GIL, so it works during a native call that
    holds the GIL.
    """
    before = {rank: _size(path) for rank, path in paths.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, stack_signal)
    deadline = monotonic() + timeout
    sizes = dict(before)
    while monotonic() < deadline:
        time.sleep(0.02)
        now = {rank: _size(path) for rank, path in paths.items()}
        if now == sizes and all(now[rank] > before[rank] for rank in now):
            break
        sizes = now
    stacks = {}
    for rank, path in paths.items():
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(before[rank])
            stacks[rank] = shorten(file.read().decode(errors="replace")).strip("\n")
    return stacks


def shorten(stacks: str) -> str:
    """Return `stacks` without the parts that all ranks share: pytest's frames, and the flight recorder's thread."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    kept = []
    for text in threads:
        if f'"{_FLIGHT_RECORDER}"' in text:
            continue
        lines = text.splitlines(keepends=True)
        first_of_pytest = next((at for at, line in enumerate(lines) if _PYTEST_FOLDER in line), len(lines))
        # If the innermost frame is pytest's own, keep all frames.
        kept.append("".join(lines[:first_of_pytest] if first_of_pytest > 1 else lines))
    return "".join(kept)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def where(stack: str) -> str:
    """Return the innermost frame of the main thread that is not in a library, as ``file:line in name``; or empty."""
    # faulthandler begins with the newest thread; the main thread is the oldest.
    main = re.split(r"^(?:Current thread|Thread) 0x", stack, flags=re.MULTILINE)[-1]
    frames = [line.strip() for line in main.splitlines() if line.lstrip().startswith("File ")]
    for frame in frames:
        if not any(part in frame for part in (*LIBRARIES, '"<frozen ', '"<string>"')):
            return frame.replace('File "', "").replace('", line ', ":", 1)
    return ""
