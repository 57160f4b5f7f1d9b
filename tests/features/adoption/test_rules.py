"""Tests of ``accel_rules``: marks that the ini file gives to tests whose files have none."""

from __future__ import annotations

import re

import pytest

from pytest_accel.features.adoption.suite_adoption import parse_rule
from tests.features.conftest import Suite

PATTERNS = {
    "tests/gpu/*": True,
    "tests/gpu": True,
    "tests/gpu/": True,
    "tests/*": True,
    "tests/gp": False,
    "gpu": False,
    "tests/gpu/test_x.py": True,
    "test_x.py": False,
    "**/test_x.py": True,
    "**/tests/gpu/test_x.py": True,
    "tests/gpu/test_x.py::TestY": True,
    "tests/gpu/test_x.py::TestY::*": True,
    "**/test_?.py::*::test_z": True,
    "tests/gpu/test_x.py::TestY::test_z[a::b/c]": True,
    "tests/gpu/test_x.py::test_z": False,
    "tests/gpu/test_x.py::Test": False,
    "TESTS/*": False,
}
"""Patterns, each with whether it matches the test ``tests/gpu/test_x.py::TestY::test_z[a::b/c]``."""


def test_patterns_match_a_test_and_what_contains_it(suite: Suite) -> None:
    suite.without_torch()
    suite.write(
        "tests/gpu/test_x.py",
        """
        import pytest

        class TestY:
            @pytest.mark.parametrize("text", ["a::b/c"])
            def test_z(self, text): pass
        """,
    )
    suite.ini("accel_rules =\n" + "".join(f"    {pattern}: devices(1)\n" for pattern in PATTERNS))

    run = suite.run()

    unmatched = re.findall(r"PytestWarning: (\S+): .*: no test matches", run.text)
    assert unmatched == [pattern for pattern, matches in PATTERNS.items() if not matches]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("*:devices(1)", "'*:devices(1)': must be PATTERN: devices(...), PATTERN: distributed(...) or"),
        ("*: accel_adopt(True)", "or PATTERN: accel_adopt(False)"),
        ("*: devices(**{'n': 1})", "and literal arguments"),
        ("*: distributed(0)", 'world_size must be an int >= 1, "all" or a non-empty list of them, got 0'),
        ("*: devices(size=2)", "there is no argument size, allowed are n, at_least, kind"),
    ],
)
def test_an_invalid_rule(rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_rule(rule)


def test_an_invalid_setting_is_a_usage_error_before_collection(suite: Suite) -> None:
    suite.write("test_plain.py", "def test_plain(): pass")
    for setting, message in {
        "accel_rules=*:devices(1)": "'*:devices(1)': must be PATTERN",
        "accel_adopt=jax": "must be torch, spawn, both or empty, got 'jax'",
    }.items():
        run = suite.run("-o", setting)
        assert run.ret == pytest.ExitCode.USAGE_ERROR
        assert f"ini option {setting.partition('=')[0]}: " in run.errors
        assert message in run.errors
        assert "collected" not in run.text


def test_rules_add_marks_that_the_files_lack(suite: Suite) -> None:
    suite.without_torch()
    suite.write(
        "sums/test_sums.py",
        """
        import os

        class TestSums:
            def test_name(self, request):
                assert request.node.get_closest_marker("distributed").kwargs == {"timeout": 30, "init": False}
                assert os.environ["WORLD_SIZE"] == "2"
        """,
    )
    suite.write(
        "test_sizes.py",
        """
        import os
        import unittest

        import pytest


        def group_size():
            return int(os.environ["WORLD_SIZE"])


        def test_each_size(world_size):
            assert group_size() == world_size


        @pytest.mark.distributed(3, init=False)
        def test_own_mark():
            assert group_size() == 3


        @pytest.mark.parametrize("name", ["two words", "x"])
        def test_one_case(name, request):
            assert (os.environ.get("WORLD_SIZE") == "2") == (name == "x")
            assert bool(request.node.get_closest_marker("distributed")) == (name == "x")


        def test_visible(accel):
            assert len(accel.ids) == 2


        class TestCase(unittest.TestCase):
            def test_method(self):
                assert group_size() in (1, 2)

            def test_first_rule(self):
                assert group_size() == 3
        """,
    )
    suite.ini(
        """
        accel_rules =
            sums: distributed(timeout=30, init=False)
            sums/*: distributed(4, init=False)
            test_sizes.py::test_each_size: distributed([1, 2], init=False)
            test_sizes.py::test_own_mark: distributed(2, init=False)
            test_sizes.py::test_one_case[x]: distributed(2, init=False)
            test_sizes.py::test_visible: devices(2)
            test_sizes.py::TestCase::test_first_rule: distributed(3, init=False)
            test_sizes.py::TestCase: distributed([1, 2], init=False)
        """
    )

    run = suite.run("-n1")
    assert run.count() == {"PASSED": 10}, run.text
    assert run.result("test_each_size[world_size=1]") == "PASSED"
    assert "no test matches" not in run.text
    assert suite.run("test_sizes.py::TestCase::test_method[world_size=2]").count() == {"PASSED": 1}
    suite.run("-m", "devices(n=2)").expect({"test_visible": "PASSED"})


@pytest.mark.long
def test_a_rule_that_matches_no_test_is_reported_if_the_whole_suite_was_collected(suite: Suite) -> None:
    suite.write("test_plain.py", "def test_other(): pass")
    suite.write("more/test_more.py", "def test_more(): pass")
    suite.ini("accel_rules =\n    **/test_typo.py: devices(1)\n    more/*: distributed(1)")

    for options, reported in (
        (("-n", "1", "-k", "other"), True),
        (("test_plain.py",), False),
    ):
        run = suite.run(*options)
        assert run.count() == {"PASSED": 1}
        assert ("PytestWarning: **/test_typo.py: devices(1): no test matches" in run.text) == reported
        assert "more/*" not in run.text
