"""Tests of pytest-testmon, which selects marked tests by the code that their ranks have executed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.features.plugins.conftest import Pair, needs

if TYPE_CHECKING:
    from tests.run import Run

pytestmark = needs("testmon")

_PRODUCT = """
    def zero():
        return 0


    def one():
        return 1


    def fixture():
        return 2


    def unmarked():
        return 3


    def unrelated():
        return 4
    """
_TESTS = """
    import os

    import product
    import pytest

    IN_RANK = "RANK" in os.environ
    RANKS = [int(os.environ["RANK"])] if IN_RANK else [0, 1]
    marked = pytest.mark.distributed(2)


    @pytest.fixture
    def thing():
        return product.fixture()


    @marked
    def test_ranks_differ(request):
        assert not (IN_RANK and hasattr(request.config, "testmon_data")), "a rank has opened the database"
        for rank in RANKS:
            assert (product.one() if rank else product.zero()) == rank


    @marked
    def test_fixture(thing):
        pass


    @marked
    @pytest.mark.parametrize("number", range(2))
    def test_fails(number):
        assert number == 0


    @marked
    def test_skips():
        product.unrelated()
        pytest.skip("not today")


    @pytest.mark.distributed(4)
    @pytest.mark.parametrize("number", range(3))
    def test_all_devices(number):
        pass


    @pytest.mark.parametrize("number", range(3))
    def test_unmarked(number):
        assert product.unmarked() == 3
    """
_INCOMPLETE = """
    import os

    import pytest


    @pytest.mark.devices(5)
    def test_needs_more_devices():
        pass


    @pytest.mark.xfail
    @pytest.mark.distributed(2)
    def test_dies(rank):
        if rank == 1:
            os._exit(3)


    @pytest.mark.distributed(2)
    def test_runs():
        pass
    """
_INCOMPLETE_OUTCOMES = {"test_needs_more_devices": "SKIPPED", "test_dies": "XFAIL", "test_runs": "PASSED"}


def change(pair: Pair, function: str) -> None:
    """Change the body of `function`, but not its result."""
    for one in (pair.plain, pair.marked):
        file = one.path / "product.py"
        file.write_text(re.sub(rf"(def {function}\(\):\n    return) ", r"\1 0 + ", file.read_text()))


def run_selected(pair: Pair, *options: str, workers: tuple[str, ...] = ()) -> tuple[set[str], Run, Run]:
    """Run both suites with `options`, the marked one with `workers`; fail if the tests of `_TESTS` have other results.

    Return the selected tests of `_TESTS` and the two sessions, the marked one last.
    """
    plain, marked = pair.plain.run("--testmon", *options), pair.marked.run("--testmon", *options, *workers)
    outcomes = marked.outcomes()
    assert {name: word for name, word in outcomes.items() if name not in _INCOMPLETE_OUTCOMES} == plain.outcomes()
    assert marked.ret == plain.ret
    return set(plain.outcomes()), plain, marked


@needs("pytest_cov")
def test_tests_are_selected_by_code_that_their_ranks_execute(pair: Pair) -> None:
    """The selection is the same with xdist and with pytest-cov. Tests that not all ranks ran are selected again."""
    pair.plugin("pytest-testmon", "pytest_cov")
    pair.write("product.py", _PRODUCT)
    pair.write("test_product.py", _TESTS)
    pair.marked.write("test_incomplete.py", _INCOMPLETE)
    selected, _, marked = run_selected(pair, workers=("-n2",))
    assert len(selected) == 11
    assert _incomplete_outcomes(marked) == _INCOMPLETE_OUTCOMES

    selected_again = {name: word for name, word in _INCOMPLETE_OUTCOMES.items() if name != "test_runs"}
    change(pair, "one")
    selected, *runs = run_selected(pair, "--cov=product", "--cov-report=term")
    assert selected == {"test_fails[1]", "test_ranks_differ"}
    assert _incomplete_outcomes(runs[1]) == selected_again
    totals = [[line for line in run.text.splitlines() if line.startswith("product.py")] for run in runs]
    assert totals[0] == totals[1] != []

    for function in ("zero", "fixture", "unmarked"):
        change(pair, function)
    selected, _, marked = run_selected(pair, workers=("-n2",))
    unmarked = {f"test_unmarked[{number}]" for number in range(3)}
    assert selected == {"test_fails[1]", "test_ranks_differ", "test_fixture", *unmarked}
    assert _incomplete_outcomes(marked) == selected_again


def _incomplete_outcomes(run: Run) -> dict[str, str]:
    """Return the outcomes of the tests of `_INCOMPLETE` that `run` has selected."""
    return {name: word for name, word in run.outcomes().items() if name in _INCOMPLETE_OUTCOMES}
