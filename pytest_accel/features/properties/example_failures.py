"""Failures of examples: their conversion for other ranks, and exceptions that stand in for failures on other ranks."""

from __future__ import annotations

import functools
from types import CodeType

from hypothesis.internal import escalation

from pytest_accel.core.serialization import exception_text, mark_repeated, stand_in_type
from pytest_accel.features.properties.example_steps import Conclusion, Failure

__hypothesistracebackhide__ = True
"""Makes Hypothesis hide this module's frames in tracebacks, as it hides its own."""

LONGEST_TEXT = 10_000
"""Characters of an exception's text that are sent to other ranks, and of an example in a report."""


def failure_of(error: BaseException) -> Failure:
    """Return the description of `error` that is sent to other ranks."""
    path, line, frame = __file__, 1, error.__traceback__
    while frame is not None:
        path, line, frame = frame.tb_frame.f_code.co_filename, frame.tb_lineno or 1, frame.tb_next
    try:
        origin = str(escalation.InterestingOrigin.from_exception(error))
    except Exception:  # The exception's context may contain objects of any kind.
        origin = f"{type(error).__qualname__} {path}:{line}"
    kind = type(error)
    return Failure(
        kind.__module__, kind.__qualname__, exception_text(error)[:LONGEST_TEXT], path, line, origin[:LONGEST_TEXT]
    )


def stand_in(found: Conclusion) -> BaseException:
    """Return an exception that stands in for the failure of another rank."""
    failure = found.failure
    assert failure is not None
    text = f"failed on rank {found.rank}: {failure.qualname}: {failure.text}"
    error = _type_of(failure.module, failure.qualname, failure.origin)(text)
    mark_repeated(error, found.rank)
    return error


@functools.cache
def _type_of(module: str, qualname: str, origin: str) -> type[BaseException]:
    """Return an exception type, the same one for the same bug: Hypothesis distinguishes bugs by type and place.

    `origin` identifies the bug. It is used only as part of the cache's key.
    """
    return stand_in_type(module, qualname, Exception)


def raise_at(error: BaseException, path: str, line: int) -> None:
    """Raise `error` so that its traceback ends at line `line` of the file `path`, such as where another rank failed."""
    __tracebackhide__ = True
    exec(_raise_statement(path, line), {"error": error})


@functools.cache
def _raise_statement(path: str, line: int) -> CodeType:
    """Return the code of ``raise error`` with `path` and `line` as its place."""
    return compile("raise error", path, "exec").replace(co_firstlineno=line)


def add_note(error: BaseException, text: str) -> None:
    """Add `text` to the report of `error`, as `BaseException.add_note` does, which Python has since 3.11."""
    vars(error).setdefault("__notes__", []).append(text)
