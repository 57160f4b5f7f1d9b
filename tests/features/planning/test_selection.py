"""Tests of ``--accel-select``: sessions that run only the tests whose needs meet a condition."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

SUITE = """
    import pytest


    def test_plain():
        pass


    @pytest.mark.devices(2)
    def test_two():
        pass


    @pytest.mark.devices(share=0.5)
    def test_half():
        pass


    @pytest.mark.distributed([2, 4])
    def test_sizes(world_size):
        pass


    @pytest.mark.distributed(2, kind="cpu", init=False)
    def test_cpu():
        pass


    @pytest.mark.distributed(8, init=False)
    def test_too_many():
        pass
    """

_CLASS = """

    @pytest.mark.distributed(4, init=False)
    class TestFour:
        def test_it(self):
            pass
    """


def _selected(suite: Suite, *options: str) -> set[str]:
    """Return the names of the tests that ``--collect-only`` lists."""
    text = suite.run("--collect-only", "-q", *options, quiet=True).text
    return {line.partition("::")[2] for line in text.splitlines() if "::" in line}


def test_the_names_in_a_condition_describe_what_a_test_gets_on_this_machine(suite: Suite) -> None:
    suite.write("test_it.py", SUITE)
    condition = "devices == 2 or world_size == 4 and backend == 'gloo' or share < 1 or not fits"
    assert _selected(suite, "--accel-select", condition) == {
        *("test_two", "test_sizes[world_size=2]", "test_sizes[world_size=4]", "test_half", "test_too_many")
    }
    # Without accelerators, ranks run on the CPU.
    without_accelerators = ("--accel", "none", "--accel-select", "devices == 0 and marked")
    assert _selected(suite, *without_accelerators) == {
        *("test_cpu", "test_sizes[world_size=2]", "test_sizes[world_size=4]", "test_too_many")
    }


def test_mark_expressions_match_arguments_that_are_given_by_position(suite: Suite) -> None:
    suite.write("test_it.py", SUITE + _CLASS)
    expression = "distributed(world_size=8) or devices(n=2) or distributed(world_size=4)"
    found = _selected(suite, "-m", f"{expression} or distributed(world_size=2, kind='cpu')")
    assert found == {"test_two", "test_too_many", "TestFour::test_it", "test_cpu"}


def test_a_condition_combines_with_other_selections_and_with_xdist(suite: Suite) -> None:
    tests = SUITE.replace("([2, 4])", "([2, 4], init=False)")
    suite.write("test_it.py", tests.replace("def test_two():\n        pass", "def test_two():\n        assert False"))
    suite.ini("addopts = --accel-select 'devices == 2'")
    run = suite.run()
    assert run.outcomes() == {"test_two": "FAILED", "test_sizes[world_size=2]": "PASSED"}
    assert "collected 7 items / 5 deselected / 2 selected" in run.text
    rerun = suite.run("--lf", "-n1")
    assert rerun.outcomes() == {"test_two": "FAILED"}
    assert "test_two" not in suite.run("--lf", "--accel-select", "not marked").outcomes()


def test_a_wrong_mark_is_an_error_even_if_the_condition_deselects_marked_tests(suite: Suite) -> None:
    suite.write("test_it.py", "import pytest\n\n\n@pytest.mark.devices(0)\ndef test_it():\n    pass\n")
    run = suite.run("--accel-select", "not marked")
    assert run.outcomes() == {"test_it": "ERROR"}
    assert "@pytest.mark.devices(n=0): n must be an int >= 1" in run.text


def test_an_invalid_condition_is_a_usage_error_before_collection(suite: Suite) -> None:
    suite.write("test_it.py", "raise AssertionError('imported')")
    run = suite.run("--accel-select", "device >= 2")
    assert run.ret == 4
    assert "argument --accel-select: device is no word of a test's needs; allowed are devices, world" in run.errors
    assert re.search(r"^ +device >= 2\n +\^$", run.errors, re.MULTILINE)
