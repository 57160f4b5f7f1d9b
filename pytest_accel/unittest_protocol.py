"""A check for test files that may be run with ``python -m unittest``, where nothing applies this plugin's marks.

A mark is pytest's and does nothing by itself: unittest would run a marked test in one process, and one that happens not
to need its peers would pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import TestCase, TestLoader, TestSuite

_MARKS = ("distributed", "devices")


class _OnlyUnderPytest(TestCase):
    """Stands for a marked test, and fails."""

    def __init__(self, test: TestCase, mark: str) -> None:
        super().__init__("fail_clearly")
        self._test = test
        self._mark = mark

    def fail_clearly(self) -> None:
        """Say what to do."""
        self.fail(f"is marked {self._mark}, which only pytest applies: run it with pytest")

    def id(self) -> str:
        """Return the id of the test that this one stands for."""
        return self._test.id()

    def __str__(self) -> str:
        return str(self._test)


def load_tests(loader: TestLoader, tests: TestSuite, pattern: str | None) -> TestSuite:
    """Return `tests` with one that fails in place of each that has a mark of this plugin.

    unittest calls the function of this name in a test file (its ``load_tests`` protocol), pytest does not::

        from pytest_accel.unittest_protocol import load_tests
    """
    found = ((test, _mark_of(test)) for test in _cases(tests))
    return TestSuite(test if mark is None else _OnlyUnderPytest(test, mark) for test, mark in found)


def _cases(tests: Iterable[Any]) -> Iterator[TestCase]:
    for test in tests:
        if isinstance(test, TestCase):
            yield test
        else:
            yield from _cases(test)


def _mark_of(test: TestCase) -> str | None:
    """Return the closest mark of the plugin, as a person would write it; None where there is none."""
    method = getattr(test, getattr(test, "_testMethodName", ""), None)
    for owner in (method, *type(test).__mro__, sys.modules.get(type(test).__module__)):
        marks: Any = getattr(owner, "__dict__", {}).get("pytestmark", ())
        for one in marks if isinstance(marks, (list, tuple)) else (marks,):
            mark: Any = getattr(one, "mark", one)  # That of a module is a decorator.
            if getattr(mark, "name", None) in _MARKS:
                arguments = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
                return f"{mark.name}({', '.join(arguments)})"
    return None
