"""Check for test files that may be run with ``python -m unittest``: marked tests fail there.

unittest ignores marks. It would run a marked test in one process, where a test that does not need its peers would pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import TestCase, TestLoader, TestSuite

from pytest_accel.core.marks import mark_text

_MARKS = ("distributed", "devices")


class _OnlyUnderPytest(TestCase):
    """Replaces a marked test under unittest, and fails."""

    def __init__(self, test: TestCase, mark: str) -> None:
        super().__init__("fail_clearly")
        self._test = test
        self._mark = mark

    def fail_clearly(self) -> None:
        """Fail with a message that says how to run the test."""
        self.fail(f"is marked {self._mark}, which only pytest applies: run it with pytest")

    def id(self) -> str:
        """Return the id of the replaced test."""
        return self._test.id()

    def __str__(self) -> str:
        return str(self._test)


def load_tests(loader: TestLoader, tests: TestSuite, pattern: str | None) -> TestSuite:
    """Return `tests`, with each test that has a mark of this plugin replaced by one that fails.

    unittest calls the function of this name in a test file (its ``load_tests`` protocol); pytest does not. Import it in
    the test file::

        from pytest_accel.unittest_protocol import load_tests
    """
    marked = ((test, _mark_of(test)) for test in _flatten(tests))
    return TestSuite(test if mark is None else _OnlyUnderPytest(test, mark) for test, mark in marked)


def _flatten(tests: Iterable[Any]) -> Iterator[TestCase]:
    """Return the test cases in `tests` and its nested suites."""
    for test in tests:
        if isinstance(test, TestCase):
            yield test
        else:
            yield from _flatten(test)


def _mark_of(test: TestCase) -> str | None:
    """Return the source text of the closest mark of the plugin, such as ``distributed(2)``, or None."""
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    for owner in (method, *type(test).__mro__, sys.modules.get(type(test).__module__)):
        marks: Any = getattr(owner, "__dict__", {}).get("pytestmark", ())
        for item in marks if isinstance(marks, (list, tuple)) else (marks,):
            mark: Any = getattr(item, "mark", item)  # `pytestmark` of a module or class may hold MarkDecorators.
            if getattr(mark, "name", None) in _MARKS:
                return mark_text(mark)
    return None
