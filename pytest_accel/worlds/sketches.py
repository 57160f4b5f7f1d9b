"""Exceptions, warnings and what tests record, in a form that always pickles."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from json import dumps as json_dumps
from pickle import dumps, loads

from pytest_accel.worlds.messages import ExceptionSketch, WarningSketch


def sketch(error: BaseException, depth: int = 5) -> ExceptionSketch:
    """`error` in a form that always pickles; its causes to a depth of `depth`."""
    try:
        text = str(error)
    except Exception as second:
        text = f"<str() of the exception raised {type(second).__name__}>"
    cause = error.__cause__
    return ExceptionSketch(
        type(error).__module__,
        type(error).__qualname__,
        text[:10_000],
        sketch(cause, depth - 1) if cause is not None and depth else None,
    )


def sketch_warning(message: warnings.WarningMessage, location: tuple[str, int, str] | None) -> WarningSketch:
    """A warning that was recorded at `location`."""
    category = message.category
    return WarningSketch(
        str(message.message), category.__module__, category.__qualname__, message.filename, message.lineno, location
    )


def plain_properties(properties: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """What a test has recorded, as it is where JSON has it, else as text: for a tensor even ``==`` is no yes or no."""
    return [(str(name), _plain(value)) for name, value in properties]


def travels(value: object) -> bool:
    """Whether another process can be sent it: what a plugin has added to a report may be anything."""
    try:
        loads(dumps(value))
    except Exception:
        return False
    return True


def _plain(value: object) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        json_dumps(value)
    except Exception:
        return _text(value)
    return value


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<str() of it raised {type(error).__name__}>"
