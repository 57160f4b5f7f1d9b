"""What happened in a rank, once more in the driver: exceptions and warnings."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import pytest

from pytest_accel import LeftoverWarning
from pytest_accel.core.messages import ExceptionSketch, WarningSketch
from pytest_accel.core.serialization import stand_in_type
from pytest_accel.verdict.judgement import RankError, RankUnstarted

_NOT_RUN = "accel_not_run"


def not_run(text: str) -> BaseException:
    """The failure of a test that no rank has run, nor been asked to."""
    failure: BaseException = pytest.fail.Exception(text, pytrace=False)
    vars(failure)[_NOT_RUN] = True
    return failure


def has_run(error: BaseException | None) -> bool:
    """False where `error` says that the test has not run in some rank."""
    return not (isinstance(error, RankUnstarted) or hasattr(error, _NOT_RUN))


def stand_in(sketch: ExceptionSketch) -> BaseException:
    """An exception of the type that was raised in a rank, as far as this process has it, with the same text.

    Marks (``xfail(raises=...)``) and plugins (reruns by exception) look at the type's name and bases and the text; the
    object itself may not pickle, or only where it was raised.
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
    """Warnings of the ranks, each once, as if the driver had seen them."""
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


def warn(lines: Sequence[str], place: tuple[str, int]) -> list[str]:
    """Warn of each line at `place`, a file and line; gives those that the session's filters make errors."""
    errors = []
    for line in lines:
        try:
            warnings.warn_explicit(line, LeftoverWarning, *place)
        except LeftoverWarning:
            errors.append(line)
    return errors
