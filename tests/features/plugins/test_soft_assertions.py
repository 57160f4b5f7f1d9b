"""Tests of plugins that collect failures while a test continues, and report them later: failures in one rank."""

from __future__ import annotations

from tests.features.conftest import Suite
from tests.features.plugins.conftest import Pair, needs

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
def test_a_failed_check_is_reported_although_its_rank_would_end_as_announced(suite: Suite) -> None:
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
            check.equal(rank, 0)
            if rank == 1:
                os._exit(7)
        """,
    )
    run = suite.run()
    run.expect({"test_it": "FAILED"})
    failure = run.failure("test_it")
    assert "check 1 == 0" in failure
    assert "a failed check ends the test on its rank" in failure
