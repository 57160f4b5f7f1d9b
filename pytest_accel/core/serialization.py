"""Exceptions, warnings and what tests record, in a form that always pickles."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from json import dumps as json_dumps
from pickle import dumps, loads
from typing import Any

from pytest_accel.core.messages import ExceptionSketch, WarningSketch


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
        *_repeated(error),
    )


def mark_repeated(error: BaseException, rank: int, *, own: bool = False) -> None:
    """Note that `error` repeats a failure of another `rank`; `own`: this rank has failed in the same way."""
    vars(error)["accel_repeats"] = rank, own


def _repeated(error: BaseException) -> tuple[int | None, bool]:
    """Return what `mark_repeated` has noted of `error`, or of all errors of the group that it is."""
    parts = getattr(error, "exceptions", None)
    if not isinstance(parts, tuple) or not all(isinstance(one, BaseException) and one is not error for one in parts):
        parts = ()  # An attribute of the same name of an exception that is no group.
    marks = [_repeated(one) for one in parts] or [vars(error).get("accel_repeats", (None, False))]
    peers = [peer for peer, _ in marks]
    return (None, False) if None in peers else (peers[0], all(own for _, own in marks))


def stand_in_type(module: str, qualname: str, fallback: type[Exception]) -> type[Exception]:
    """Return a type of exceptions whose text is what they are made with, in place of one of another process.

    It has the name of that type and, if this process has it, that type as its base; else `fallback`.
    """
    kind: Any = sys.modules.get(module)
    for name in qualname.split("."):
        kind = getattr(kind, name, None)
    # pytest asks its own FixtureLookupError to format itself, which it can only where it was raised.
    usable = isinstance(kind, type) and issubclass(kind, Exception) and not hasattr(kind, "formatrepr")
    base: Any = kind if usable else fallback

    class StandIn(base):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            Exception.__init__(self, text)
            self._text = text

        def __str__(self) -> str:
            return self._text

        def __getattr__(self, name: str) -> Any:
            # The type's own may need what its `__init__` sets: that of urllib's HTTPError raises KeyError.
            raise AttributeError(name)

    StandIn.__name__, StandIn.__qualname__, StandIn.__module__ = qualname.rpartition(".")[2], qualname, module
    return StandIn


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
