"""Conversion of exceptions, warnings and recorded properties into forms that can always be pickled."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from json import dumps as json_dumps
from pickle import dumps, loads
from traceback import format_exception_only
from typing import Any

import pytest

from pytest_accel.messages.rank_messages import ExceptionSketch, WarningSketch


def sketch(error: BaseException, depth: int = 5) -> ExceptionSketch:
    """Return `error`, with up to `depth` of its causes, in a form that can always be pickled."""
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
    try:
        if isinstance(error, pytest.FixtureLookupError):
            return error.formatrepr().errorstring.strip().splitlines()[0]
        doctest = sys.modules.get("doctest")
        if doctest is not None and isinstance(error, doctest.UnexpectedException):
            return "".join(format_exception_only(error.exc_info[1])).strip()
        if doctest is not None and isinstance(error, doctest.DocTestFailure):
            return f"expected {error.example.want.strip()!r}, got {error.got.strip()!r}"
        return str(error)
    except Exception as second:
        return f"<str() of the exception raised {type(second).__name__}>"


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
    """Return `message`, a warning recorded at `location`, in a form that can always be pickled."""
    category = message.category
    return WarningSketch(
        str(message.message), category.__module__, category.__qualname__, message.filename, message.lineno, location
    )


def plain_properties(properties: Iterable[tuple[str, object]]) -> list[tuple[str, object]]:
    """Return recorded `properties`, in which text replaces the values that JSON cannot represent.

    The driver compares the values of the ranks, and ``==`` of tensors does not return a bool.
    """
    return [(str(name), _plain(value)) for name, value in properties]


def travels(value: object) -> bool:
    """Return whether `value`, which a plugin may have added to a report, can be pickled and unpickled."""
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
