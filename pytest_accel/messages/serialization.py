"""Conversion of exceptions, warnings and reports into plain data, which messages can have."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from traceback import format_exception_only
from typing import Any

import pytest

from pytest_accel.messages.rank_messages import ExceptionSketch, WarningSketch


class RankDataError(Exception):
    """An implementation of `pytest_accel_rank_data` raised, or returned data that is not plain or a key in use."""

    accel_not_run = True  # The attribute `NOT_RUN`.


def sketch(error: BaseException, depth: int = 5) -> ExceptionSketch:
    """Return `error`, with up to `depth` of its causes, as plain data."""
    cause = error.__cause__
    return ExceptionSketch(
        type(error).__module__,
        type(error).__qualname__,
        exception_text(error)[:10_000],
        sketch(cause, depth - 1) if cause is not None and depth else None,
    )


def exception_text(error: BaseException) -> str:
    """Return the text of `error`, or a replacement if its ``str()`` raises.

    The ``str()`` of some errors is not readable. For pytest's error for a missing fixture, return the first line of its
    report; for the errors of a doctest, the example's own error, or its expected and actual output.
    """
    with suppress(Exception):
        if isinstance(error, pytest.FixtureLookupError):
            return error.formatrepr().errorstring.strip().splitlines()[0]
        doctest = sys.modules.get("doctest")
        if doctest is not None and isinstance(error, doctest.UnexpectedException):
            return "".join(format_exception_only(error.exc_info[1])).strip()
        if doctest is not None and isinstance(error, doctest.DocTestFailure):
            return f"expected {error.example.want.strip()!r}, got {error.got.strip()!r}"
    return _text(error)


def stand_in_type(module: str, qualname: str, fallback: type[Exception]) -> type[Exception]:
    """Return an exception type that stands in for a type of another process; its instances have a given text.

    It has the name of that type. Its base is the type itself if this process has imported it, else `fallback`.
    """
    kind: Any = sys.modules.get(module)
    for name in qualname.split("."):
        kind = getattr(kind, name, None)
    # Types with `formatrepr` (FixtureLookupError) format themselves in pytest, which fails outside their process.
    usable = isinstance(kind, type) and issubclass(kind, Exception) and not hasattr(kind, "formatrepr")
    base: Any = kind if usable else fallback

    class StandIn(base):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            Exception.__init__(self, text)
            self._text = text

        def __str__(self) -> str:
            return self._text

        def __getattr__(self, name: str) -> Any:
            # The base class's __getattr__ may need attributes from its __init__: urllib's HTTPError raises a KeyError.
            raise AttributeError(name)

    StandIn.__name__, StandIn.__qualname__, StandIn.__module__ = qualname.rpartition(".")[2], qualname, module
    return StandIn


def sketch_warning(message: warnings.WarningMessage, location: tuple[str, int, str] | None) -> WarningSketch:
    """Return `message`, a warning recorded at `location`, as plain data."""
    category, text = message.category, _text(message.message)
    return WarningSketch(text, category.__module__, category.__qualname__, message.filename, message.lineno, location)


def plain(value: Any) -> Any:
    """Return `value` as plain data: text replaces each object that is none, such as an argument of a subtest.

    xdist ends the session if a report has such an object.
    """
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, list):
        return [*map(plain, value)]
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), _text(value))


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<str() of it raised {type(error).__name__}>"
