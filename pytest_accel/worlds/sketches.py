"""Exceptions and warnings in a form that always pickles."""

from __future__ import annotations

import warnings

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
