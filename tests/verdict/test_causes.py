"""Tests of the causes of failures: as text, on another rank, and outside of the test."""

from __future__ import annotations

import pytest

from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.messages.rank_messages import ExceptionSketch, ExitCause, RankExit, exited
from pytest_accel.verdict.causes import (
    Cause,
    CauseKind,
    Consequence,
    cause_of,
    error_consequence,
)
from tests.verdict.phases import died, failed, hung, terminated


def runtime_error(text: str) -> ExceptionSketch:
    return ExceptionSketch("builtins", "RuntimeError", text)


LOST, TIMED_OUT = Consequence.LOST_CONNECTION, Consequence.TIMED_OUT


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (runtime_error("[pair.cc:553] Connection closed by peer [127.0.0.1]:17108. GLHF!"), LOST),
        (runtime_error("wait timeout after 1000ms, keys: /world/0"), TIMED_OUT),
        (runtime_error("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1000 ms"), TIMED_OUT),
        (ExceptionSketch("threading", "BrokenBarrierError", ""), Consequence.BROKEN_BARRIER),
        (ExceptionSketch("builtins", "ConnectionResetError", "[Errno 104]"), LOST),
        (ExceptionSketch("mine", "StepFailed", "step 3", runtime_error("Connection closed by peer")), LOST),
        (runtime_error("shapes do not match"), None),
        (ExceptionSketch("builtins", "AssertionError", "assert 'Connection closed by peer' in ''"), None),
        (ExceptionSketch("builtins", "AssertionError", "wrong", runtime_error("Connection closed by peer")), None),
        (None, None),
    ],
)
def test_errors_of_secondary_failures_are_recognized(
    error: ExceptionSketch | None, consequence: Consequence | None
) -> None:
    assert error_consequence(error) == consequence


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (failed(1), "failed: AssertionError; rank 1"),
        (died(1), "died: SIGSEGV; rank 1"),
        (RankOutcome(1, "died", exit=exited(3)), "died: status 3; rank 1"),
        (RankOutcome(1, "died", exit=RankExit(ExitCause.OUT_OF_MEMORY, -9)), "died: out of memory; rank 1"),
        (RankOutcome(1, "died"), "died: unknown; rank 1"),
        (hung(1), "hung: phase timeout; rank 1"),
        (terminated(1, RankOutcome(0, "failed")), "hung: other rank; rank 1"),
        (RankOutcome(1, "unstarted", text="no"), "unstarted; rank 1"),
        (RankOutcome(1, "failed", text="a copy"), "failed: forked copy; rank 1"),
    ],
)
def test_a_cause_has_a_kind_a_detail_and_ranks(outcome: RankOutcome, text: str) -> None:
    assert str(cause_of(outcome, [1])) == text
    assert str(Cause(CauseKind.DISAGREED, "skip")) == "disagreed: skip"
