"""Tests of plugins that collect failures while a test continues, and report them later: failures in one rank."""

from __future__ import annotations

from tests.features.plugins.conftest import Pair, needs
from tests.run import CAUSES

_TESTS = """
    import os

    import pytest
    from pytest_check import check

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, kind="cpu")

    def wrong(what="soft"): check.is_false(LAST, what)

    @pytest.fixture
    def wrong_in_teardown():
        yield
        wrong("in teardown")

    @two
    def test_wrong():
        wrong()
        wrong("once more")

    @two
    def test_teardown(wrong_in_teardown): pass

    @two
    @pytest.mark.xfail(raises=AssertionError)
    def test_expected_type(): wrong()

    def test_unmarked(): check.equal(1, 1)
    """


@needs("pytest_check")
def test_failed_checks_in_one_rank_fail_the_test(pair: Pair) -> None:
    pair.plugin("pytest_check.plugin")
    pair.write("test_it.py", _TESTS)
    _, marked = pair.run_both("-rA")
    failure = marked.failure("test_wrong")
    for text in (": soft", "Failed Checks: 2", "rank 0: passed", "rank 1 of 2"):
        assert text in failure


_ENDS = """
    import os

    import pytest
    from pytest_check import check

    pytestmark = pytest.mark.distributed(2, kind="cpu")

    def test_before_the_announcement(faults, rank):
        check.equal(rank, 0)
        faults.expect_exit(1, status=3)
        rank and os._exit(3)

    def test_after_the_announcement(faults, rank):
        faults.expect_exit(1, status=3)
        with check:
            assert rank == 0
        rank and os._exit(3)

    def test_ends(faults, rank):
        check.equal(1, 1)
        faults.expect_exit(1, status=3)
        rank and os._exit(3)
    """


@needs("pytest_check")
def test_failed_checks_of_a_rank_that_ends_as_announced_fail_the_test(pair: Pair) -> None:
    suite = pair.marked
    suite.plugin("pytest_check.plugin")
    suite.write("test_ends.py", _ENDS)
    run = suite.run(CAUSES)
    checks = ("test_before_the_announcement", "test_after_the_announcement")
    run.expect(dict.fromkeys(checks, "FAILED failed: failed check; rank 1") | {"test_ends": "PASSED"})
    for test in checks:
        assert "the test passed; a check failed on rank 1 before the announced end\n" in run.failure(test)
