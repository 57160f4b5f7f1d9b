"""What can be learnt of a rank that died or does not answer."""

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
from pytest_accel.rank import flight_recorder

_LAST_OUTPUT = 8_000
_PYTESTS = f"{os.sep}_pytest{os.sep}"
_OWN = flight_recorder.__file__


SERVER_ENDED = -(1 << 16)
"""Stands for the exit status of ranks that went down with their fork server. No signal has this number."""
MACHINE_LOST = -(1 << 17)
"""Stands for that of ranks on a machine that has been cut off."""
LOST_WITH_SERVER = "ended with the fork server, which is gone"
JOB_ENDED = -(1 << 18)
"""Stands for the exit status of ranks that were ended with the MPI job that they belong to."""
LOCK_LOST = -(1 << 19)
"""Stands for the exit status of ranks that this session has killed, since another may have their devices."""
LOST_WITH_JOB = "ended with its MPI job, since a rank has called MPI_Abort or has died"


def describe_exit(status: int) -> str:
    """An exit status in words: the signal's name, or what was passed to ``exit``."""
    if status == SERVER_ENDED:
        return LOST_WITH_SERVER
    if status == JOB_ENDED:
        return LOST_WITH_JOB
    if status == LOCK_LOST:
        return "ended by this session: the lock of its devices was lost, and another session may use them"
    if status == MACHINE_LOST:
        return "lost with its node, which does not answer any more"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def tail(path: str, limit: int = _LAST_OUTPUT) -> str:
    """The end of a log, at most `limit` characters; empty where there is none. Of a log that is kept, the last test."""
    try:
        text = Path(path).read_bytes()[-limit:].decode(errors="replace")
    except OSError:
        return ""
    _, heading, last = text.rpartition(HEADING)
    return (last.partition("\n")[2] if heading else text).strip("\n")


def take_stacks(
    pids: dict[int, int], paths: dict[int, str], stack_signal: int, patience: float = 1.0
) -> dict[int, str]:
    """The Python stacks of all threads of the processes `pids`, by rank; empty text for one that did not answer.

    The handler is faulthandler's, written in C: it needs no GIL, so it answers out of a native call that holds it.
    """
    before = {rank: _size(path) for rank, path in paths.items()}
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, stack_signal)
    deadline = monotonic() + patience
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
    """`stacks` without what is alike in all: pytest's frames around a test, and a rank's thread for its own record."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    kept = []
    for text in threads:
        if f'"{_OWN}"' in text:
            continue
        lines = text.splitlines(keepends=True)
        around = next((at for at, line in enumerate(lines) if _PYTESTS in line), len(lines))
        # Where pytest itself is at work, that is what there is to see.
        kept.append("".join(lines[:around] if around > 1 else lines))
    return "".join(kept)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def where(stack: str) -> str:
    """The innermost frame of a stack's main thread that is not a library's, for a one-line account; else empty."""
    # faulthandler begins with the newest thread, and the main thread is the oldest.
    main = re.split(r"^(?:Current thread|Thread) 0x", stack, flags=re.MULTILINE)[-1]
    frames = [line.strip() for line in main.splitlines() if line.lstrip().startswith("File ")]
    for frame in frames:
        if not any(part in frame for part in (*LIBRARIES, '"<frozen ', '"<string>"')):
            return frame.replace('File "', "").replace('", line ', ":", 1)
    return ""
