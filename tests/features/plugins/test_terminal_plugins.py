"""Tests of plugins that replace pytest's terminal reporter, or change what it shows."""

from __future__ import annotations

import re

import pytest

from tests.features.plugins.conftest import Pair, needs
from tests.run import Run

_TESTS = """
    import pytest

    in_ranks = pytest.mark.distributed(2, kind="cpu", init=False)

    def test_here(): assert [1, 2] == [1, 3]

    @in_ranks
    def test_in_ranks(): assert [1, 2] == [1, 3]

    @in_ranks
    def test_skips(): pytest.skip("not today")

    @in_ranks
    @pytest.mark.xfail(reason="known")
    def test_known(): assert 0

    @in_ranks
    @pytest.mark.parametrize("n", [1, 2])
    def test_many(n): pass

    @pytest.fixture
    def broken(): raise ValueError("broken")

    @in_ranks
    def test_has_no_fixture(broken): pass
    """
_OUTCOMES = r"\d+ (?:passed|failed|skipped|xfailed|error)s?"
_SUGAR = rf"^ +{_OUTCOMES}$|^ +- test_mix.py:.*|^ test_mix.py \S+"
"""The output of pytest-sugar: totals, failed tests, and a line with the progress of each file."""


def _find_in_output(run: Run, pattern: str) -> list[str]:
    """Return the parts of the output of `run`, without colours, that match `pattern`; fail if there are none."""
    found = re.findall(pattern, re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", run.text), re.MULTILINE)
    assert found, f"no match of {pattern} in\n{run.text}"
    return found


@needs("pytest_sugar")
def test_each_test_is_shown_once(pair: Pair) -> None:
    """Under xdist, only lines that do not depend on the order in which tests end are compared."""
    pair.without_torch()
    pair.plugin("sugar")
    pair.write("test_mix.py", _TESTS)
    plain, marked = (one.run("--force-sugar", quiet=True) for one in (pair.plain, pair.marked))
    assert _find_in_output(marked, _SUGAR) == _find_in_output(plain, _SUGAR)
    assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED
    distributed = pair.marked.run("-n1", "--force-sugar", quiet=True)
    expected, shown = (
        sorted(line for line in _find_in_output(run, _SUGAR) if not line.startswith(" test_mix.py"))
        for run in (plain, distributed)
    )
    assert shown == expected
