"""The verdict on one phase of a test, and the ways in which pytest gets it: as an exception, and in its report.

The ranks' warnings, which the driver repeats, are here, too.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import pytest
from msgspec import Struct, field

from pytest_accel import LeftoverWarning
from pytest_accel.core.record_events import RankPhase
from pytest_accel.core.stash_keys import NOT_RUN
from pytest_accel.core.truncation import cut_output
from pytest_accel.messages.rank_messages import ExceptionSketch, WarningSketch
from pytest_accel.messages.serialization import stand_in_type
from pytest_accel.verdict.causes import Cause, CauseKind


class Verdict(Struct, frozen=True):
    """The result of one phase of a test, merged over its ranks, and everything that has to be done because of it."""

    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    message: str = ""
    """The line that pytest's short summary shows; for a skip the reason."""
    cause: Cause | None = None
    """The cause of a failure; None for another outcome, and for a test that was not sent to its ranks."""
    error: ExceptionSketch | None = None
    """The exception of the rank whose failure this is; None if no rank has reported an exception."""
    longrepr: Any = None
    """pytest's representation of the failure, serialized as pytest does it."""
    sections: tuple[tuple[str, str], ...] = ()
    """Title and text of captured output, labelled by rank."""
    wasxfail: str | None = None
    """The reason of an xfail mark that a rank added while the test ran; None if there was none."""
    duration: float = 0.0
    """Seconds of the slowest rank, which may have died, hung or been stopped without a report."""
    properties: tuple[tuple[str, object], ...] = ()
    """Name and value of the user properties of the ranks, labelled by rank where ranks differ."""
    rank_data: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    """Data that plugins have sent from ranks with their reports, by rank."""
    warnings: tuple[WarningSketch, ...] = ()
    """Warnings of all ranks, to be replayed in the driver."""
    leak_warnings: tuple[str, ...] = ()
    """A line about each leak, as a warning for the user."""
    kill_reason: str | None = None
    """Why the ranks must be killed after this test; None if they need not be."""
    retire: bool = False
    """True if the ranks must not run another test, but can shut down cleanly."""
    ranks: tuple[RankPhase, ...] = ()
    """The phase in each rank."""
    place: tuple[str, int] | None = None
    """File and line of a failure that a rank has reported; None if `longrepr` has them."""

    def exception(self) -> BaseException | None:
        """Return the exception by which pytest learns the outcome in the driver; None if the phase passed."""
        if self.outcome == "passed":
            return None
        if self.outcome == "skipped":
            return pytest.skip.Exception(self.message)
        if self.outcome == "xfailed":
            return pytest.xfail.Exception(self.message.removeprefix("reason: "))
        if self.error is not None:
            return stand_in(self.error)
        return RankError(self.message) if self.cause is None else RAISED[self.cause.kind](self.message)

    def complete(self, report: pytest.TestReport, call: pytest.CallInfo[None], item: pytest.Item) -> None:
        """Put the ranks' results into pytest's `report` of the driver's phase, and their time into its `call`."""
        if self.duration:
            # Use the ranks' duration: the driver receives the reports of all phases when the test has ended.
            report.duration, report.stop = self.duration, report.start + self.duration
            call.duration, call.stop = self.duration, call.start + self.duration
        if self.sections:
            report.sections.extend(self.sections if item.config.get_verbosity() >= 2 else cut_output(self.sections))
        if self.wasxfail is not None and not report.failed:
            report.wasxfail = self.wasxfail
        if self.longrepr is None or report.passed:
            return
        if self.outcome == "skipped" and isinstance(self.longrepr, (tuple, list)):
            report.longrepr = tuple(self.longrepr)
        elif isinstance(self.longrepr, dict) and not isinstance(report.longrepr, str):
            report.longrepr = self.representation(item)

    def representation(self, item: pytest.Item) -> Any:
        """Return `longrepr` as the object that pytest makes for a failure of `item`."""
        data = {
            "$report_type": "TestReport",
            "nodeid": item.nodeid,
            "location": item.location,
            "keywords": {},
            "outcome": "failed",
            "longrepr": deepcopy(self.longrepr),  # pytest modifies it.
            "when": "call",
        }
        return item.config.hook.pytest_report_from_serializable(config=item.config, data=data).longrepr


class RankError(Exception):
    """Raised in the driver for a failure for which no rank has reported an exception."""


class RankDied(RankError):
    """A rank's process ended in the middle of a test."""


class RankHung(RankError):
    """A rank did not finish in time."""


class RankUnstarted(RankError):
    """A rank could not start, or could not run the test."""

    accel_not_run = True  # The attribute `NOT_RUN`.


class RanksDisagree(RankError):
    """Some ranks skipped and some ran, or they issued different numbers of collectives."""


class LeftBehind(RankError):
    """The test has leaked something in its ranks (``accel_leaks``)."""


RAISED: dict[CauseKind, type[RankError]] = {
    CauseKind.FAILED: RankError,
    CauseKind.DIED: RankDied,
    CauseKind.HUNG: RankHung,
    CauseKind.UNSTARTED: RankUnstarted,
    CauseKind.DISAGREED: RanksDisagree,
    CauseKind.LEAKED: LeftBehind,
}
"""The exception that is raised in the driver for each kind of cause if no rank has reported an exception."""


def not_run(text: str) -> BaseException:
    """Return an exception for a test that was not sent to its ranks."""
    failure: BaseException = pytest.fail.Exception(text, pytrace=False)
    vars(failure)[NOT_RUN] = True
    return failure


def report_not_run(report: pytest.TestReport) -> None:
    """Report an error that is no failure of the test itself: as a failure also with xfail, and by its text alone."""
    if hasattr(report, "wasxfail"):
        del report.wasxfail
        report.outcome = "failed"
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = crash.message.removeprefix("Failed: ")  # pytest's short summary has the exception's name.


def stand_in(sketch: ExceptionSketch) -> BaseException:
    """Return an exception with the type (if this process has it) and text of an exception in a rank.

    Marks (``xfail(raises=...)``) and plugins (reruns by exception) check the type's name, its bases and the text. The
    original object is not sent, since it may be impossible to pickle, or to unpickle in another process.
    """
    error: BaseException
    try:
        error = stand_in_type(sketch.module, sketch.qualname, RankError)(sketch.text)
    except Exception:
        error = RankError(sketch.text)
    if sketch.cause is not None:
        error.__cause__ = stand_in(sketch.cause)
    return error


def replay_warnings(item: pytest.Item, sketches: Sequence[WarningSketch]) -> None:
    """Report each distinct warning of the ranks once, as if it had been raised in the driver."""
    for sketch in dict.fromkeys(sketches):
        category = getattr(sys.modules.get(sketch.category_module), sketch.category, None)
        if not (isinstance(category, type) and issubclass(category, Warning)):
            category = UserWarning
        message = warnings.WarningMessage(category(sketch.message), category, sketch.filename, sketch.lineno)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": sketch.location,
            }
        )


def raises(leaks: Sequence[str], place: tuple[str, int]) -> bool:
    """Warn of each of `leaks` at `place` (file, line); return True if a warning filter makes that an error."""
    try:
        for line in leaks:
            warnings.warn_explicit(line, LeftoverWarning, *place)
    except LeftoverWarning:
        return True
    return False
