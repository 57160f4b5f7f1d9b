"""Marks of the project, and fixtures of others, that have the names of the plugin's. Imported when there are any.

`MarkOwners` (`core/marks.py`) decides whose a mark is. This module finds the tests that show it, and has the texts.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping

import pytest

from pytest_accel.core.frames import is_library
from pytest_accel.core.marks import MarkError, MarkFinder, MarkOwners, check
from pytest_accel.core.shims import fixtures_by_name, is_own_fixture
from pytest_accel.fixtures import FIXTURES

_WITH_EITHER_MARK = frozenset({"accel", "device", "devices"})
_WITHOUT_MARKS = frozenset({"launch"})
"""The plugin's fixtures for which a test needs either mark, or none. For the others it needs ``distributed``."""
_PYTEST = os.path.dirname(inspect.getfile(pytest.FixtureDef))
"""The folder of pytest's own fixtures."""
_PAGE = "docs/how-to/adopt-a-suite.md#a-mark-of-your-own"


class MarkUse:
    """Finds out whether tests use marks that the project has registered as those of the plugin."""

    def __init__(self, owners: MarkOwners) -> None:
        self._owners = owners
        self._ours = MarkFinder(owners)
        self._all = MarkFinder()

    def name(self, item: pytest.Item) -> str | None:
        """Return the name of a mark of the project that `item` uses as the plugin's; None if nothing shows that.

        It shows that if it needs the mark for a fixture of the plugin, which its other marks do not allow.
        """
        marks, ours = self._all.find(item), self._ours.find(item)
        if marks == ours:
            return None
        found = fixtures_by_name(item).items()
        own = {name for name, definition in found if is_own_fixture(definition)} - _WITHOUT_MARKS
        lacks_ranks = marks.distributed is not None and ours.distributed is None
        if lacks_ranks and own - _WITH_EITHER_MARK:
            return "distributed"
        if own & _WITH_EITHER_MARK and not any(ours):
            return "devices" if marks.devices is not None else "distributed"
        return None

    def note(self, items: Iterable[pytest.Item]) -> None:
        """Tell the owners which of the names that the project has registered `items` use as the plugin's."""
        for item in items:
            if not (unclear := self._owners.by_rule):
                return
            if (name := self.name(item)) is not None and name in unclear:
                self._owners.used.add(name)
                self._ours = MarkFinder(self._owners)

    def left_alone(self, items: Iterable[pytest.Item]) -> dict[str, int]:
        """Return the number of `items` with a mark of the project whose arguments the plugin's allows, by name."""
        counts: dict[str, int] = {}
        for item in items:
            for mark, own in zip(self._all.find(item), self._ours.find(item), strict=True):
                if mark is not None and own is None and mark.name in self._owners.by_rule and _is_allowed(mark):
                    counts[mark.name] = counts.get(mark.name, 0) + 1
        return counts


def _is_allowed(mark: pytest.Mark) -> bool:
    try:
        check(mark)
    except MarkError:
        return False
    return True


def header_line(names: Iterable[str]) -> str:
    """Return the line of the session's header on marks that the project has registered."""
    shown = sorted(names)
    what = " and ".join(f"`{name}`" for name in shown)
    return (
        f"accel: this project registers {'the mark' if len(shown) == 1 else 'the marks'} {what} of its own: tests with "
        f"{'it' if len(shown) == 1 else 'them'} are left alone, unless one of them uses a fixture of pytest-accel; "
        f"`accel_marks = own` hands {'it' if len(shown) == 1 else 'them'} over: {_PAGE}"
    )


def summary_lines(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield a line of the summary for each mark of the project whose tests could be meant for the plugin."""
    without = {"devices": "leased devices", "distributed": "ranks"}
    for name, count in sorted(counts.items()):
        tests = "1 test has" if count == 1 else f"{count} tests have"
        yield (
            f"{tests} the project's mark `{name}`, so pytest-accel gave no {without[name]}; other files may show more "
            f"about the mark. Set `accel_marks = "
            f"{name}:own` if the mark is meant for it, or `accel_marks = {name}:project` to confirm that it is not"
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
