"""Recognizes failures of a world whose cause lies outside of the test. Pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from pytest_accel.core.rank_exit import ExitCause, exited
from pytest_accel.core.rank_messages import ExceptionSketch
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.verdict.secondary_failures import is_consequence, wrong_outcomes

_LOST_DEVICE = "a device was lost"
_KILLED = exited(-signal.SIGKILL)
_DEATHS = {
    ExitCause.OUT_OF_MEMORY: "a rank was killed: out of memory",
    ExitCause.SERVER_ENDED: "the fork server was lost",
    ExitCause.NODE_LOST: "a node was lost",
}
_ERRORS = (
    "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable.
    "GPU is lost",  # NVML_ERROR_GPU_IS_LOST: the GPU has fallen off the bus, or cannot be reached (nvml.h).
    "UR_RESULT_ERROR_DEVICE_LOST",  # Unified Runtime, under SYCL; below it ZE_RESULT_ERROR_DEVICE_LOST.
    "ZE_RESULT_ERROR_DEVICE_LOST",
)
"""Texts that occur in the errors that runtimes raise for a lost device."""


def outside_cause(outcomes: Sequence[RankOutcome]) -> str | None:
    """Return the cause of a failure that lies outside of the test; None if there is no such cause.

    At least one failed rank must have such a cause. Each other failed rank must have one too, be a consequence of
    another rank's failure, or have been killed by SIGKILL: if the kernel kills several ranks because memory ran out,
    its single counter shows that for one of them only.
    """
    wrong = wrong_outcomes(outcomes)
    causes = [_cause(outcome) for outcome in wrong]
    found = [cause for cause in causes if cause is not None]
    explained = all(
        cause is not None or is_consequence(outcome, wrong) or outcome.exit == _KILLED
        for outcome, cause in zip(wrong, causes, strict=True)
    )
    return found[0] if found and explained else None


def _cause(outcome: RankOutcome) -> str | None:
    if outcome.ending == "died":
        return None if outcome.exit is None else _DEATHS.get(outcome.exit.cause)
    error: ExceptionSketch | None = outcome.report.exception if outcome.report is not None else None
    while error is not None and (error.module, error.qualname) != ("builtins", "AssertionError"):
        if any(text in error.text for text in _ERRORS):
            return _LOST_DEVICE
        error = error.cause
    return None
