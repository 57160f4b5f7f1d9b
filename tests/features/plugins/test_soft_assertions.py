"""Tests of plugins that collect failures while a test continues, and report them later: failures in one rank."""

from __future__ import annotations

from tests.features.plugins.conftest import Pair, needs
from tests.run import CAUSES

_TESTS = """
    import os

    import pytest
    from pytest_check import check

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, kind="cpu", init=False)

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
    pair.without_torch()
    pair.plugin("pytest_check.plugin")
    pair.write("test_it.py", _TESTS)
    _, marked = pair.run_both("-rA")
    failure = marked.failure("test_wrong")
    for text in (": soft", "Failed Checks: 2", "rank 0: passed", "rank 1 of 2"):
        assert text in failure


@needs("pytest_check")
def test_a_failed_check_before_an_announced_end_fails_the_test(pair: Pair) -> None:
    suite = pair.marked
    suite.without_torch()
    suite.plugin("pytest_check.plugin")
    suite.write(
        "test_it.py",
        """
        import os

        import pytest
        from pytest_check import check


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_it(faults, rank):
            faults.expect_exit(1, status=7)
            check.equal(rank, 0, "too late")
            if rank == 1:
                os._exit(7)
        """,
    )
    run = suite.run(CAUSES)
    run.expect({"test_it": "FAILED failed: AssertionError; rank 1"})
    assert "too late" in run.failure("test_it")
