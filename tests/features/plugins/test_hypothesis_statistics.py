"""Tests of Hypothesis: statistics of marked tests, and patches for their failing examples."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair
    from tests.run import Run

pytestmark = needs("hypothesis")

_TESTS = """
    import pytest
    from hypothesis import assume, given, seed, settings, target
    from hypothesis import strategies as st

    settings.register_profile("suite", deadline=None, database=None, max_examples=20)
    settings.load_profile("suite")
    marked = pytest.mark.distributed(2, kind="cpu")


    @marked
    @seed(1)
    @given(x=st.integers(0, 9))
    def test_passes(x):
        assume(x)
        target(float(x), label="size")


    @marked
    @seed(1)
    @given(x=st.integers())
    def test_fails(x):
        assert x < 10


    @seed(1)
    @given(x=st.integers(0, 9))
    def test_unmarked(x):
        pass
    """


def test_statistics_of_marked_and_unmarked_tests_are_equal(pair: Pair) -> None:
    pair.plugin("_hypothesis_pytestplugin")
    pair.write("test_it.py", _TESTS)
    args = ("--hypothesis-show-statistics", "-Wdefault")
    plain, marked = pair.plain.run(*args), pair.marked.run(*args, "-n1")
    assert marked.outcomes() == plain.outcomes()
    assert _parse_statistics(marked) == _parse_statistics(plain)
    assert len(_parse_statistics(plain)) == 3
    assert "Highest target score: 9" in _parse_statistics(marked)["test_it.py::test_passes"]
    assert ("git apply" in marked.text) == ("git apply" in plain.text)


def _parse_statistics(run: Run) -> dict[str, str]:
    """Return the statistics that `run` shows of each test, without run times, in any order of the tests."""
    shown = run.text.partition(" Hypothesis Statistics ")[2].partition("\n===")[0]
    _, *parts = re.split(r"^(test_it\.py::\w+):$", shown, flags=re.MULTILINE)
    texts = [re.sub(r"\(.* seconds\)|Typical runtimes: .*", "", text).strip() for text in parts[1::2]]
    return dict(zip(parts[::2], texts, strict=True))
