"""The exceptions that the driver raises for failures of ranks, and the ranks' warnings, which it repeats."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import pytest

from pytest_accel import LeftoverWarning, PreloadWarning
from pytest_accel.messages.rank_messages import ExceptionSketch, WarningSketch
from pytest_accel.messages.serialization import stand_in_type
from pytest_accel.verdict.causes import CauseKind


class RankError(Exception):
    """Raised in the driver for a failure for which no rank has reported an exception."""


class RankDied(RankError):
    """A rank's process ended in the middle of a test."""


class RankHung(RankError):
    """A rank did not finish in time."""


class RankUnstarted(RankError):
    """A rank could not start, or could not run the test."""


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

_NOT_RUN = "accel_not_run"
_REPORTED: pytest.StashKey[set[str]] = pytest.StashKey()
"""The messages of the warnings that a session reports once, on the `pytest.Session`."""


def not_run(text: str) -> BaseException:
    """Return an exception for a test that was not sent to its ranks."""
    failure: BaseException = pytest.fail.Exception(text, pytrace=False)
    vars(failure)[_NOT_RUN] = True
    return failure


def has_run(error: BaseException | None) -> bool:
    """Return whether all ranks have run the test, given the exception `error` of the phase."""
    return not (isinstance(error, RankUnstarted) or hasattr(error, _NOT_RUN))


def put_cause_first(report: pytest.TestReport, error: BaseException | None) -> None:
    """Remove pytest's ``Failed: `` before the text of an error of this plugin in the line of the short summary."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if not has_run(error) and crash is not None:
        crash.message = str(error)


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
    """Report each distinct warning of the ranks once, as if it had been raised in the driver.

    Report a :class:`PreloadWarning` once in the session: each world warns about each file.
    """
    reported = item.session.stash.setdefault(_REPORTED, set())
    for sketch in dict.fromkeys(sketches):
        if sketch.category == PreloadWarning.__name__:
            if sketch.message in reported:
                continue
            reported.add(sketch.message)
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


def warn(lines: Sequence[str], place: tuple[str, int]) -> list[str]:
    """Issue a warning for each line at `place` (file, line); return the lines that warning filters turn into errors."""
    errors = []
    for line in lines:
        try:
            warnings.warn_explicit(line, LeftoverWarning, *place)
        except LeftoverWarning:
            errors.append(line)
    return errors
