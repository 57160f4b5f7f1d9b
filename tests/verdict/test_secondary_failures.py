from __future__ import annotations

import pytest

from pytest_accel.core.rank_messages import ExceptionSketch
from pytest_accel.verdict.secondary_failures import Consequence, error_consequence


def runtime(text: str, cause: ExceptionSketch | None = None) -> ExceptionSketch:
    return ExceptionSketch("builtins", "RuntimeError", text, cause)


LOST, WAITED = Consequence.LOST_CONNECTION, Consequence.TIMED_OUT


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (runtime("[pair.cc:553] Connection closed by peer [127.0.0.1]:17108. GLHF!"), LOST),
        (runtime("wait timeout after 1000ms, keys: /world/0"), WAITED),
        (runtime("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 1000 ms"), WAITED),
        (ExceptionSketch("threading", "BrokenBarrierError", ""), Consequence.BROKEN_BARRIER),
        (ExceptionSketch("builtins", "ConnectionResetError", "[Errno 104]"), LOST),
        (ExceptionSketch("mine", "StepFailed", "step 3", runtime("Connection closed by peer")), LOST),
        (runtime("shapes do not match"), None),
        (ExceptionSketch("builtins", "AssertionError", "assert 'Connection closed by peer' in ''"), None),
        (ExceptionSketch("builtins", "AssertionError", "wrong", runtime("Connection closed by peer")), None),
        (None, None),
    ],
)
def test_what_a_failure_says_of_another_rank(error: ExceptionSketch | None, said: Consequence | None) -> None:
    assert error_consequence(error) == said
