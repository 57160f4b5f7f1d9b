"""Tests of projects that register marks of the same names, and of sessions without some of pytest's own plugins."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_needs_xdist = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs xdist")


@pytest.mark.long
@pytest.mark.parametrize("options", [(), pytest.param(("-n", "1"), marks=_needs_xdist)])
def test_a_clash_with_a_mark_of_the_project_is_reported_once(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    distributed: needs a cluster\n    slow: takes long")
    pytester.makeconftest("def pytest_configure(config): config.addinivalue_line('markers', 'devices(n): needs some')")
    pytester.makepyfile("def test_plain(): pass")

    result = pytester.runpytest_subprocess("--accel", "none", *options)

    assert [line for line in result.outlines if line.startswith("accel: this project")] == [
        f"accel: this project registers a mark `{name}` of its own; with this plugin it {does}. "
        "`-p no:accel` leaves it alone: docs/how-to/adopt-a-suite.md"
        for name, does in (("devices", "runs tests with leased devices"), ("distributed", "runs tests in ranks"))
    ]


@pytest.mark.long
def test_the_marks_of_the_plugin_are_not_reported_as_a_clash(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest_subprocess("--accel", "none")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*registers a mark*")


@pytest.mark.long
def test_sessions_without_some_builtin_plugins_of_pytest_work(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest

        def test_keeps(cache):
            cache.set("mine", 7)

        @pytest.mark.distributed(2)
        def test_in_ranks(rank):
            assert rank < 2

        def test_has_kept(cache):
            assert cache.get("mine", None) == 7
        """,
    )
    run = suite.run("-p", "no:capture", "-p", "no:debugging", "--cache-clear")
    assert run.count() == {"PASSED": 3}
