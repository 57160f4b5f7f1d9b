"""Tests of Hypothesis: statistics of marked tests."""

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


    @seed(1)
    @given(x=st.integers(0, 9))
    def test_unmarked(x):
        pass
    """


def test_statistics_of_marked_tests_are_those_of_rank_0(pair: Pair) -> None:
    pair.plugin("_hypothesis_pytestplugin")
    pair.write("test_it.py", _TESTS)
    plain, marked = (one.run("--hypothesis-show-statistics", "-Wdefault") for one in (pair.plain, pair.marked))
    expected, found = _parse_statistics(plain), _parse_statistics(marked)
    assert found.keys() == expected.keys() == {"test_it.py::test_passes", "test_it.py::test_unmarked"}
    assert found["test_it.py::test_unmarked"] == expected["test_it.py::test_unmarked"]
    for text in ("gave up because: failed to satisfy assume() in test_passes", "Highest target score: 9"):
        assert text in found["test_it.py::test_passes"]


def _parse_statistics(run: Run) -> dict[str, str]:
    """Return the statistics that `run` shows of each test, without run times, in any order of the tests."""
    shown = run.text.partition(" Hypothesis Statistics ")[2].partition("\n===")[0]
    _, *parts = re.split(r"^(test_it\.py::\w+):$", shown, flags=re.MULTILINE)
    texts = [re.sub(r"\(.* seconds\)|Typical runtimes: .*", "", text).strip() for text in parts[1::2]]
    return dict(zip(parts[::2], texts, strict=True))
