"""Exit statuses, logs and Python stacks of ranks that died or do not answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import LIBRARIES
from pytest_accel.core.paths import HEADING
from pytest_accel.core.rank_exit import ExitCause, RankExit
from pytest_accel.rank import flight_recorder

_LAST_OUTPUT = 8_000
"""Maximum number of bytes of a log that are shown."""
_PYTEST_FOLDER = f"{os.sep}_pytest{os.sep}"
_FLIGHT_RECORDER = flight_recorder.__file__


OUT_OF_MEMORY = "out of memory (the oom_kill counter of the control group went up)"
_TEXTS = {
    ExitCause.SERVER_ENDED: "ended with the fork server, which is gone",
    ExitCause.NODE_LOST: "lost with its node, which does not answer any more",
    ExitCause.JOB_ENDED: "ended with its MPI job, since a rank has called MPI_Abort or has died",
    ExitCause.LOCK_LOST: "killed by this session: the lock of its devices was lost, and another session may use them",
}


def describe_exit(end: RankExit) -> str:
    """Return the end of a rank in words: the cause, the name of the signal, or the number passed to ``exit``."""
    if end.cause in _TEXTS:
        return _TEXTS[end.cause]
    assert end.status is not None
    text = f"exit status {end.status}" if end.status >= 0 else _describe_signal(-end.status)
    return f"{text}: {OUT_OF_MEMORY}" if end.cause is ExitCause.OUT_OF_MEMORY else text


def _describe_signal(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def tail(path: str, limit: int = _LAST_OUTPUT) -> str:
    """Return the end of a log, at most `limit` bytes of it; empty if there is no log.

    Of a log that is kept over several tests, only the part of the last test is returned.
    """
    try:
        text = Path(path).read_bytes()[-limit:].decode(errors="replace")
    except OSError:
        return ""
    _, heading, last = text.rpartition(HEADING)
    return (last.partition("\n")[2] if heading else text).strip("\n")


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
