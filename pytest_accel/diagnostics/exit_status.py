"""How a rank ended: the text for its exit status or its hang, and the last lines of its log."""

from __future__ import annotations

from os import fstat
from pathlib import Path

from pytest_accel.core.paths import HEADING
from pytest_accel.core.rank_exit import ExitCause, RankExit
from pytest_accel.core.signals import signal_name
from pytest_accel.diagnostics.rank_state import Hang, HangCause

LAST_OUTPUT = 8_000
"""Maximum number of bytes or characters of a log that are shown."""
OUT_OF_MEMORY = "out of memory (the oom_kill counter of the control group went up)"
_TEXTS = {
    ExitCause.SERVER_ENDED: "ended with the fork server, which is gone",
    ExitCause.NODE_LOST: "lost with the node",
    ExitCause.JOB_ENDED: "ended with its MPI job, since a rank has called MPI_Abort or has died",
    ExitCause.LOCK_LOST: "killed by this session: the lock of its devices was lost, and another session may use them",
}


_PASSIVE = frozenset((ExitCause.NODE_LOST, ExitCause.LOCK_LOST))
"""The causes whose text is a participle."""


def describe_exit(end: RankExit, be: str = "") -> str:
    """Return the predicate of a sentence about a rank that ended like this: ``exited with status 3``.

    `be` (``was`` or ``were``) is put before a participle such as ``killed``; leave it empty for a list.
    """
    be = f"{be} " if be else ""
    if end.cause in _TEXTS:
        text = f"{be if end.cause in _PASSIVE else ''}{_TEXTS[end.cause]}"
        return f"{text} {end.about}" if end.about else text
    assert end.status is not None
    text = f"exited with status {end.status}" if end.status >= 0 else f"{be}killed by {signal_name(-end.status)}"
    return f"{text}: {OUT_OF_MEMORY}" if end.cause is ExitCause.OUT_OF_MEMORY else text


def describe_hang(hang: Hang, be: str = "was") -> str:
    """Return what to say of a rank that hung: ``timed out after 5 s``, ``was stopped 3 s after rank 1 failed``.

    `be` is the verb for one rank or for several.
    """
    match hang.cause:
        case HangCause.PHASE_TIMEOUT:
            phase = f" in the {hang.when} phase" if hang.when != "call" else ""
            return f"timed out{phase} after {hang.seconds:g} s"
        case HangCause.START_TIMEOUT:
            return f"did not become ready within {hang.seconds:g} s"
        case HangCause.COLLECTION_TIMEOUT:
            return f"did not import and collect the test's file within {hang.seconds:g} s"
        case HangCause.STALLED:
            return f"stopped in the middle of a message for {hang.seconds:g} s"
        case HangCause.UNREAD:
            return f"did not read the driver's message within {hang.seconds:g} s"
        case HangCause.OTHER_RANK:
            return f"{be} stopped {hang.seconds:g} s after {hang.event}"
        case HangCause.DEADLOCK:
            return f"{be} in a deadlock"


def tail(path: str, limit: int = LAST_OUTPUT) -> str:
    """Return the end of a log, at most `limit` bytes of it; empty if there is no log.

    Of a log that is kept over several tests, only the part of the last test is returned.
    """
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, fstat(file.fileno()).st_size - limit))
            text = file.read(limit).decode(errors="replace")
    except OSError:
        return ""
    _, heading, last = text.rpartition(HEADING)
    return (last.partition("\n")[2] if heading else text).strip("\n")
