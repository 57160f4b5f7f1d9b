"""The failure of a test that uses a fixture without the mark that the fixture needs."""

from __future__ import annotations

import pytest

_TEXT = "accel_missing_mark"
"""Attribute of the exception with its text without a place."""


def missing_mark(text: str) -> BaseException:
    """Return the exception for a fixture to raise; `text` names the fixture and the mark."""
    error = pytest.fail.Exception(text, pytrace=False)
    vars(error)[_TEXT] = text
    return error


def name_place(error: BaseException, item: pytest.Item) -> None:
    """Add the file and line of `item` to `error` if it is one of :func:`missing_mark`.

    The fixture cannot do so: pytest raises the exception of a session's fixture again in each test that uses it.
    """
    if isinstance(error, pytest.fail.Exception) and (text := vars(error).get(_TEXT)) is not None:
        path, line, _ = item.location
        error.msg = f"{text} ({path}{'' if line is None else f':{line + 1}'})"
