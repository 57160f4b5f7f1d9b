"""Tests of coverage in ranks: lines and branches equal those of the same tests without ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.features.conftest import Suite
from tests.features.plugins.conftest import Pair, needs

pytestmark = needs("pytest_cov")

_PRODUCT = """
    def set_up():
        return 1


    def work(rank):
        if rank == 0:
            return "zero"
        return "more"


    def tear_down():
        return 3


    def unmarked():
        return 5


    def unused():
        return 6
    """
_TESTS = """
    import os

    import product
    import pytest

    marked = pytest.mark.distributed(2, kind="cpu", init=False)
    RANKS = [int(os.environ["RANK"])] if "RANK" in os.environ else [0, 1]

    @pytest.fixture
    def thing():
        product.set_up()
        yield
        product.tear_down()

    @marked
    def test_marked(thing):
        for rank in RANKS:
            assert product.work(rank)

    def test_unmarked(thing): assert product.unmarked() == 5
    """


def read_lines(folder: Path) -> set[int]:
    """Return the lines of the product that ran; fail unless there is exactly one data file."""
    from coverage import CoverageData

    assert [path.name for path in folder.glob(".coverage*")] == [".coverage"]
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    return set(data.lines(str(folder / "product.py")) or ())


def test_lines_and_branches_of_ranks_are_measured(pair: Pair) -> None:
    pair.without_torch()
    pair.plugin("pytest_cov")
    pair.write("product.py", _PRODUCT)
    pair.write("test_product.py", _TESTS)
    args = ("--cov=product", "--cov-branch", "--cov-report=term-missing", "--cov-fail-under=70")
    plain = pair.plain.run(*args)
    marked = pair.marked.run(*args, "-n2")
    assert marked.outcomes() == plain.outcomes()
    assert marked.ret == plain.ret
    expected = read_lines(pair.plain.path)
    assert 8 in expected
    assert read_lines(pair.marked.path) == expected
    totals = [[line for line in run.text.splitlines() if line.startswith("TOTAL")] for run in (plain, marked)]
    assert totals[0] == totals[1] != []


_KILLED = """
    import os
    import signal

    import product
    import pytest
    from tests.lazy_torch import dist

    @pytest.mark.distributed(2, kind="cpu")
    def test_dies(rank):
        if rank == 1:
            product.unused()
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.distributed(2, kind="cpu")
    def test_damages_its_ranks():
        product.unmarked()
        dist.destroy_process_group()

    @pytest.mark.distributed(2, kind="cpu")
    def test_after(rank): product.work(0)
    """


def test_killed_rank_loses_coverage_of_one_test_and_a_replaced_one_none(suite: Suite) -> None:
    suite.plugin("pytest_cov")
    suite.write("product.py", _PRODUCT)
    suite.write("test_product.py", _KILLED)
    suite.write("test_other.py", "import product\n\ndef test_other(): product.work(1)\n")
    assert suite.run("--cov=product", "test_other.py").count() == {"PASSED": 1}
    run = suite.run("--cov=product", "--cov-append", "test_product.py")
    run.expect({"test_dies": "FAILED", "test_damages_its_ranks": "PASSED", "test_after": "PASSED"})
    found = read_lines(suite.path)
    assert {8, 9, 17} <= found
    assert 21 not in found


def test_coverage_without_pytest_cov_measures_ranks_unless_it_is_too_old(pair: Pair, pytester: pytest.Pytester) -> None:
    marked = pair.marked
    marked.write("product.py", _PRODUCT)
    marked.write(
        "test_product.py",
        """
        import product
        import pytest

        @pytest.mark.distributed(2, kind="cpu")
        def test_work(rank): assert product.work(rank)
        """,
    )
    (marked.path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = (
        *(sys.executable, "-m", "coverage", "run", f"--data-file={marked.path / '.coverage'}", "--source=product"),
        *("-m", "pytest", "-p", "accel", f"--rootdir={marked.path}", str(marked.path)),
    )
    result = pytester.run(*command)
    result.assert_outcomes(passed=1)
    assert {7, 8, 9} <= read_lines(marked.path)

    marked.write("conftest.py", "import coverage.config\n\ndel coverage.config.CoverageConfig.serialize\n")
    result = pytester.run(*command)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["accel: coverage * does not measure what ranks run: install coverage 7.10.3 or newer"])
