"""The causes of failures, as data: of a phase, outside of the test, or on another rank. Pure functions.

Code and plugins compare causes, never texts: `sentences` makes the text of a report when the verdict is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct

from pytest_accel.core.signals import signal_name
from pytest_accel.core.truncation import ranks_text
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.messages.rank_messages import ExceptionSketch, ExitCause


class CauseKind(Enum):
    """The kinds of causes for which a phase of a test fails."""

    FAILED = "failed"
    """A rank reported a failure; or their reports together are a failure, such as failed subtests."""
    DIED = "died"
    HUNG = "hung"
    UNSTARTED = "unstarted"
    """A rank could not run the test, or did not report the phase."""
    DISAGREED = "disagreed"
    """The ranks had different outcomes, collectives or process groups."""
    LEAKED = "leaked"


class Cause(Struct, frozen=True):
    """The cause of a failed phase. A property of the test's reports has its text (`stash_keys.CAUSE`)."""

    kind: CauseKind
    detail: str = ""
    """The type of the exception, the signal or exit status, the value of the `ExitCause` or `HangCause`, or the thing
    in which the ranks differ.
    """
    ranks: tuple[int, ...] = ()
    """The ranks that the failure is about; empty if it is about none in particular."""

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.kind.value}{detail}{f'; {ranks_text(self.ranks)}' if self.ranks else ''}"


def cause_of(root: RankOutcome, ranks: Sequence[int]) -> Cause:
    """Return the cause of a failure that the outcome `root` has caused; `ranks` have the same outcome."""
    detail = ""
    if root.report is not None:
        error = root.report.exception
        detail = "" if error is None else error.qualname.rpartition(".")[2]
    elif root.hang is not None:
        detail = root.hang.cause.value
    elif root.ending == "died":
        detail = _exit_detail(root)
    elif root.ending == "failed":
        detail = "forked copy"
    return Cause(CauseKind(root.ending), detail, tuple(ranks))


def _exit_detail(outcome: RankOutcome) -> str:
    """Return the signal or the exit status of a rank that died, or why the session ended it."""
    end = outcome.exit
    if end is None:
        return "unknown"
    if end.cause is not ExitCause.EXITED or end.status is None:
        return end.cause.value
    return signal_name(-end.status) if end.status < 0 else f"status {end.status}"


class Consequence(Enum):
    """The kinds of failure that another rank has caused."""

    LOST_CONNECTION = "lost connection"
    TIMED_OUT = "timed out"
    BROKEN_BARRIER = "broken barrier"
    FAILED_EXAMPLE = "failed example"
    """An example of a property-based test failed on another rank."""
    JOB_ENDED = "job ended"
    """The MPI job ended because of another rank."""


_LOST, _TIMED_OUT = Consequence.LOST_CONNECTION, Consequence.TIMED_OUT

_TEXTS = {
    # gloo's transport (gloo/transport/tcp/pair.cc) and c10d's sockets (torch/csrc/distributed/c10d/socket.cpp).
    "Connection closed by peer": _LOST,
    "Connection reset by peer": _LOST,
    "Broken pipe": _LOST,
    "Failed to recv, got 0 bytes": _LOST,
    # NCCL: ncclRemoteError, and ProcessGroupNCCL's error for an aborted communicator.
    "remote process exited or there was a network error": _LOST,
    "NCCL communicator was aborted": _LOST,
    # TCPStore and its PrefixStore (TCPStore.cpp), gloo's timeouts, and torch.distributed.monitored_barrier.
    "Socket Timeout": _TIMED_OUT,
    "wait timeout after": _TIMED_OUT,
    "store.get": _TIMED_OUT,
    "Application timeout caused pair closure": _TIMED_OUT,
    "failed to pass monitoredBarrier": _TIMED_OUT,
}
"""Texts that occur in errors of torch's backends when another rank is gone or late, and what they mean."""

_TYPES = {
    ("threading", "BrokenBarrierError"): Consequence.BROKEN_BARRIER,
    ("builtins", "ConnectionResetError"): _LOST,
    ("builtins", "BrokenPipeError"): _LOST,
    # On a rank where the example of Hypothesis's @reproduce_failure passes.
    ("hypothesis.errors", "DidNotReproduce"): Consequence.FAILED_EXAMPLE,
}


def consequence(outcome: RankOutcome) -> Consequence | None:
    """Return what `outcome` says about the failure of another rank; None if it is a failure in its own right."""
    if outcome.exit is not None and outcome.exit.cause is ExitCause.JOB_ENDED:
        return Consequence.JOB_ENDED
    return None if outcome.report is None else error_consequence(outcome.report.exception)


def error_consequence(error: ExceptionSketch | None) -> Consequence | None:
    """Return what the failure `error` says about another rank.

    Return None if `error` is a failure in its own right. The causes of `error` are searched too, but only up to an
    AssertionError: an assertion about such a text is a failure of the test itself.
    """
    while error is not None:
        if (error.module, error.qualname) == ("builtins", "AssertionError"):
            return None
        meaning = _TYPES.get((error.module, error.qualname))
        meaning = meaning or next((found for text, found in _TEXTS.items() if text in error.text), None)
        if meaning is not None:
            return meaning
        error = error.cause
    return None
