"""Whether a test's world went down for a reason that lies outside of the test: pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_accel.core.messages import ExceptionSketch
from pytest_accel.diagnostics.exit_status import LOST_WITH_SERVER
from pytest_accel.diagnostics.oom import NOTE
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.verdict.report_text import is_consequence

_LOST_DEVICE = "a device was lost"
_DEATHS = {NOTE: "a rank was killed for want of memory", LOST_WITH_SERVER: "the fork server was lost"}
"""Parts of the account of a death."""
_ERRORS = (
    "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable.
    "GPU is lost",  # NVML_ERROR_GPU_IS_LOST: it has fallen off the bus, or cannot be reached (nvml.h).
    "UR_RESULT_ERROR_DEVICE_LOST",  # Unified Runtime, under SYCL; below it ZE_RESULT_ERROR_DEVICE_LOST.
    "ZE_RESULT_ERROR_DEVICE_LOST",
)
"""Parts of the errors that runtimes raise for a device that is gone."""


def outside_cause(outcomes: Sequence[RankOutcome]) -> str | None:
    """What went wrong, where nothing else did; None: the test has to answer for it, or nothing was wrong.

    Of ranks that were killed for want of memory at one time, only one may be known to be: there is one counter.
    """
    wrong = [outcome for outcome in outcomes if outcome.ending in ("died", "failed", "unstarted")]
    causes = [_cause(outcome) for outcome in wrong]
    known = [cause for cause in causes if cause is not None]
    explained = all(
        cause is not None or is_consequence(outcome, wrong) or outcome.text == "killed by SIGKILL"
        for outcome, cause in zip(wrong, causes, strict=True)
    )
    return known[0] if known and explained else None


def _cause(outcome: RankOutcome) -> str | None:
    if outcome.ending == "died":
        return next((cause for sign, cause in _DEATHS.items() if sign in outcome.text), None)
    error: ExceptionSketch | None = outcome.report.exception if outcome.report is not None else None
    while error is not None and (error.module, error.qualname) != ("builtins", "AssertionError"):
        if any(sign in error.text for sign in _ERRORS):
            return _LOST_DEVICE
        error = error.cause
    return None
