"""Tests of `error_consequence`, which recognizes errors that follow from the failure of another rank."""

from __future__ import annotations

import pytest

from pytest_accel.core.rank_messages import ExceptionSketch
from pytest_accel.verdict.secondary_failures import Consequence, error_consequence


def runtime_error(text: str, cause: ExceptionSketch | None = None) -> ExceptionSketch:
    return ExceptionSketch("builtins", "RuntimeError", text, cause)


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
