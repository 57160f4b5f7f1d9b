"""Recognizes failures of a rank that only result from the failure or absence of another rank. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from pytest_accel.core.rank_exit import ExitCause
from pytest_accel.core.rank_messages import ExceptionSketch
from pytest_accel.diagnostics.rank_state import RankOutcome


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
    ("pytest_accel", "RankZeroFailed"): _TIMED_OUT,  # features/plugins/benchmark.py
}


def wrong_outcomes(outcomes: Sequence[RankOutcome]) -> list[RankOutcome]:
    """Return the outcomes of ranks that died, failed, or could not run the test."""
    return [outcome for outcome in outcomes if outcome.ending in ("died", "failed", "unstarted")]


def is_consequence(outcome: RankOutcome, wrong: Sequence[RankOutcome]) -> bool:
    """Return whether `outcome` only results from the failure of another rank, and several ranks are `wrong`."""
    return len(wrong) > 1 and consequence(outcome) is not None


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
    if error is not None and error.peer is not None:
        return Consequence.FAILED_EXAMPLE
    while error is not None:
        if (error.module, error.qualname) == ("builtins", "AssertionError"):
            return None
        meaning = _TYPES.get((error.module, error.qualname))
        meaning = meaning or next((found for text, found in _TEXTS.items() if text in error.text), None)
        if meaning is not None:
            return meaning
        error = error.cause
    return None
