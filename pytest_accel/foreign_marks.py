"""Marks of the project, and fixtures of others, that have the names of the plugin's. Imported when there are any.

`MarkOwners` (`core/marks.py`) decides whose a mark is. This module has the texts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable

import pytest

from pytest_accel.compat.pytest_shims import fixtures_by_name, is_own_fixture
from pytest_accel.core.frames import is_library
from pytest_accel.core.marks import MarkFinder, MarkOwners
from pytest_accel.fixtures import FIXTURES

_PYTEST = os.path.dirname(inspect.getfile(pytest.FixtureDef))
"""The folder of pytest's own fixtures."""
_PAGE = "docs/how-to/adopt-a-suite.md#a-mark-of-your-own"


def header_line(names: Iterable[str]) -> str:
    """Return the line of the session's header on marks that the project has registered."""
    shown = sorted(names)
    what = " and ".join(f"`{name}`" for name in shown)
    return (
        f"accel: this project registers {'the mark' if len(shown) == 1 else 'the marks'} {what} of its own: tests with "
        f"{'it' if len(shown) == 1 else 'them'} are left alone; "
        f"`accel_marks = own` hands {'it' if len(shown) == 1 else 'them'} over: {_PAGE}"
    )


def about_marks(item: pytest.Item, owners: MarkOwners) -> str | None:
    """Return a sentence on a mark of the project that `item` has; None if it has none."""
    found = [mark.name for mark in MarkFinder().find(item) if mark is not None and not owners.is_ours(mark)]
    if not found:
        return None
    return (
        f"the mark `{found[-1]}` of this test is the project's own, so pytest-accel ran it without ranks and devices: "
        f"`accel_marks = {found[-1]}:own` hands the mark over"
    )


def about_fixtures(item: pytest.Item) -> list[str]:
    """Return a line for each fixture of another plugin or the suite that `item` gets in place of the plugin's."""
    lines = []
    for name, definition in fixtures_by_name(item).items():
        code = getattr(definition.func, "__code__", None)
        if name not in FIXTURES or code is None or is_own_fixture(definition):
            continue
        if code.co_filename.startswith(_PYTEST):
            continue  # A parameter of the test.
        owner = "another plugin" if is_library(code.co_filename) else "the suite"
        lines.append(
            f"the fixture {name!r} of this test is that of {owner} ({code.co_filename}:{code.co_firstlineno}), "
            "not that of pytest-accel, which has the same name"
        )
    return lines
