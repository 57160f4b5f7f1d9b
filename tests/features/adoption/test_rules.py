"""Tests of ``accel_rules``: marks that the ini file gives to tests whose files have none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from pytest_accel.features.adoption import marker_rules

if TYPE_CHECKING:
    from tests.features.conftest import Suite

SUMS = """
import os


def test_adds_up():
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == 2


class TestMore:
    def test_name(self, request):
        assert request.node.get_closest_marker("distributed").kwargs == {"timeout": 30}
        assert os.environ["WORLD_SIZE"] == "2"
"""


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

    unmatched = [line.partition(": ")[0] for line in run.text.splitlines() if line.endswith("no test matches")]
    assert unmatched == [pattern for pattern, matches in PATTERNS.items() if not matches]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tests/*", "must be PATTERN: devices(...) or PATTERN: distributed(...)"),
        ("tests/*:devices(1)", "must be PATTERN: devices(...)"),
        ("tests/*: devices(", "must be PATTERN: devices(...)"),
        ("tests/*: devices(__import__('os').getpid())", "and literal arguments"),
        ("tests/*: devices(**{'n': 1})", "and literal arguments"),
        ("tests/*: distributed(0)", 'world_size must be an int >= 1, "all" or a non-empty list of them, got 0'),
        ("tests/*: devices(size=2)", "there is no argument size, allowed are n, at_least, kind"),
    ],
)
def test_an_invalid_line_is_an_error(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        marker_rules.parse(line, by_name=False)
    assert str(raised.value).startswith(f"{line!r}: ")


def test_an_invalid_line_is_a_usage_error_before_collection(suite: Suite) -> None:
    suite.write("test_sums.py", SUMS)
    suite.ini("accel_rules =\n    test_sums.py: distributed(world_size=0)")

    run = suite.run()

    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "ini option accel_rules: 'test_sums.py: distributed(world_size=0)'" in run.errors
    assert "world_size must be an int >= 1" in run.errors
    assert "collected" not in run.text
    run = suite.run("-o", "accel_rules=", "-o", "accel_adopt=jax")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "ini option accel_adopt: must be torch or empty, got 'jax'" in run.errors


def test_rules_add_marks_that_the_files_lack(suite: Suite) -> None:
    suite.write("sums/test_sums.py", SUMS)
    suite.write(
        "test_sizes.py",
        """
        import os
        import unittest

        import pytest


        def group_size():
            import torch.distributed as dist

            return dist.get_world_size()


        def test_each_size(world_size):
            assert group_size() == world_size


        @pytest.mark.distributed(3)
        def test_own_mark():
            assert group_size() == 3


        @pytest.mark.parametrize("name", ["two words", "x"])
        def test_one_case(name, request):
            assert (os.environ.get("WORLD_SIZE") == "2") == (name == "x")
            assert bool(request.node.get_closest_marker("distributed")) == (name == "x")


        def test_visible(devices):
            assert len(devices) == 2


        def test_by_hook():
            assert group_size() == 3


        class TestCase(unittest.TestCase):
            def test_method(self):
                assert group_size() in (1, 2)

            def test_first_rule(self):
                assert group_size() == 3
        """,
    )
    suite.write(
        "conftest.py",
        """
        import pytest


        def pytest_collection_modifyitems(items):
            for item in items:
                if item.name == "test_by_hook":
                    item.add_marker(pytest.mark.distributed(3))
        """,
    )
    suite.ini(
        """
        accel_rules =
            sums: distributed(timeout=30)
            sums/*: distributed(4)
            test_sizes.py::test_each_size: distributed([1, 2])
            test_sizes.py::test_own_mark: distributed(2)
            test_sizes.py::test_one_case[x]: distributed(2)
            test_sizes.py::test_visible: devices(2)
            test_sizes.py::test_by_hook: distributed(2)
            test_sizes.py::TestCase::test_first_rule: distributed(3)
            test_sizes.py::TestCase: distributed([1, 2])
        """
    )

    for options in ((), ("-n", "2")):
        run = suite.run(*options)
        assert run.count() == {"PASSED": 12}, run.text
        assert run.result("test_each_size[world_size=1]") == "PASSED"
        assert "adoption" not in run.text
    assert suite.run("test_sizes.py::TestCase::test_method[world_size=2]").count() == {"PASSED": 1}
    for selection in ("devices", "devices(n=2)"):
        run = suite.run("-m", selection)
        assert run.count() == {"PASSED": 1}, run.text
        assert run.result("test_visible") == "PASSED"


@pytest.mark.long
def test_a_rule_that_matches_no_test_is_reported_if_the_whole_suite_was_collected(suite: Suite) -> None:
    suite.write("test_plain.py", "import os\ndef test_crash(): os._exit(1)\ndef test_other(): pass")
    suite.write("more/test_more.py", "def test_more(): pass")
    suite.ini("accel_rules =\n    **/test_typo.py: devices(1)\n    more/*: distributed(1)")

    for options in (("-k", "other"), ("-n", "1")):  # One of the workers crashes.
        run = suite.run(*options)
        assert "**/test_typo.py: devices(1): no test matches" in run.text
        assert "more/*" not in run.text
    assert "no test matches" not in suite.run("test_plain.py", "-k", "other").text
    assert "no test matches" not in suite.run("--ignore", "more", "-k", "other").text
