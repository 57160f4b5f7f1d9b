"""How a process ended: the text for its exit status, and the last lines of its log."""

from __future__ import annotations

from pathlib import Path

from pytest_accel.core.paths import HEADING
from pytest_accel.core.rank_exit import ExitCause, RankExit
from pytest_accel.core.signals import signal_name

_LAST_OUTPUT = 8_000
"""Maximum number of bytes of a log that are shown."""
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
    text = f"exit status {end.status}" if end.status >= 0 else f"killed by {signal_name(-end.status)}"
    return f"{text}: {OUT_OF_MEMORY}" if end.cause is ExitCause.OUT_OF_MEMORY else text


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
