"""Tests of pytest-testmon, which selects marked tests by the code that their ranks have executed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import Pair, needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite

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


def change(pair: Pair, function: str) -> None:
    """Change the body of `function`, but not its result."""
    for one in (pair.plain, pair.marked):
        file = one.path / "product.py"
        file.write_text(re.sub(rf"(def {function}\(\):\n    return) ", r"\1 0 + ", file.read_text()))


def run_selected(pair: Pair, *options: str) -> set[str]:
    """Run both suites, the marked one with `options`; return the selected tests, and fail if these differ."""
    plain, marked = pair.plain.run("--testmon"), pair.marked.run("--testmon", *options)
    assert marked.outcomes() == plain.outcomes()
    assert marked.ret == plain.ret
    return set(marked.outcomes())


def test_tests_are_selected_by_code_that_their_ranks_execute(pair: Pair) -> None:
    pair.plugin("pytest-testmon")
    pair.write("product.py", _PRODUCT)
    pair.write("test_product.py", _TESTS)
    assert len(run_selected(pair)) == 11
    for functions, tests in (
        (["one"], {"test_ranks_differ"}),
        (["fixture", "unmarked"], {"test_fixture", *(f"test_unmarked[{number}]" for number in range(3))}),
    ):
        for function in functions:
            change(pair, function)
        assert run_selected(pair) == {"test_fails[1]", *tests}


def test_tests_are_selected_by_code_that_their_ranks_execute_under_xdist(pair: Pair) -> None:
    pair.plugin("pytest-testmon")
    pair.write("product.py", _PRODUCT)
    pair.write("test_product.py", _TESTS)
    assert len(run_selected(pair, "-n2")) == 11
    change(pair, "one")
    assert run_selected(pair, "-n2") == {"test_fails[1]", "test_ranks_differ"}


def test_testmon_selects_tests_again_that_not_all_ranks_have_run(suite: Suite) -> None:
    suite.plugin("pytest-testmon")
    suite.write(
        "test_it.py",
        """
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
        """,
    )
    incomplete = {"test_needs_more_devices": "SKIPPED", "test_dies": "XFAIL"}
    for expected in ({**incomplete, "test_runs": "PASSED"}, incomplete, incomplete):
        assert suite.run("--testmon").outcomes() == expected
    suite.write(
        "conftest.py", "from testmon.testmon_core import TestmonCollector\n\ndel TestmonCollector.discard_current\n"
    )
    run = suite.run("--testmon", "--testmon-noselect")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "of pytest-testmon, which has no discard_current" in run.errors


@pytest.mark.nightly
@needs("pytest_cov")
def test_testmon_and_pytest_cov_work_together(pair: Pair) -> None:
    pair.plugin("pytest-testmon", "pytest_cov")
    pair.write("product.py", _PRODUCT)
    pair.write("test_product.py", _TESTS)
    for function, tests in (("zero", 11), ("one", 2)):
        change(pair, function)
        plain, marked = (
            one.run("--testmon", "--cov=product", "--cov-report=term") for one in (pair.plain, pair.marked)
        )
        assert marked.outcomes() == plain.outcomes()
        assert len(marked.results) == tests
        totals = [[line for line in run.text.splitlines() if line.startswith("product.py")] for run in (plain, marked)]
        assert totals[0] == totals[1] != []
