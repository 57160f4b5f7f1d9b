"""Marks of the project that have the names of the plugin's. Imported when there are any.

`MarkOwners` (`core/marks.py`) decides whose a mark is. This module has the texts.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pytest_accel.core.marks import MarkFinder, MarkOwners

_PAGE = "docs/how-to/adopt-a-suite.md#a-mark-of-your-own"


def header_line(names: Iterable[str]) -> str:
    """Return the line of the session's header on marks that the project has registered."""
    shown = " and ".join(f"`{name}`" for name in sorted(names))
    return (
        f"accel: this project registers marks of its own, {shown}: tests with them are left alone; "
        f"`accel_marks = own` hands them over: {_PAGE}"
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
