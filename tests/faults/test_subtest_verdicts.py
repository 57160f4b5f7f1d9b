"""Tests of subtests, and of checks that do not end a test, that end differently on the ranks of a world."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import without_subtests

_TESTS = """
    import unittest

    import pytest
    from tests.lazy_torch import dist

    pytestmark = pytest.mark.distributed(2)


    def test_skips(subtests, rank):
        with subtests.test("a"):
            if rank == 1:
                pytest.skip("by hand")


    def test_fails(subtests, rank):
        with subtests.test("a"):
            assert rank == 0, "by hand"


    def test_has_none(subtests, rank):
        if rank == 0:
            with subtests.test("a"):
                pass


    class TestOfUnittest(unittest.TestCase):
        def test_unittest_skips(self):
            for name in "ab":
                with self.subTest(name):
                    if dist.get_rank() == 1:
                        self.skipTest("by hand")


    @pytest.fixture
    def late_subtest(subtests, rank):
        yield
        with subtests.test("late"):
            if rank == 1:
                pytest.skip("by hand")


    def test_teardown(late_subtest):
        pass


    @pytest.fixture
    def ends_earlier_on_rank_0(subtests, rank):
        yield
        with subtests.test("late"):
            pass
        if rank == 0:
            dist.barrier()


    def test_passes_at_different_times(ends_earlier_on_rank_0, subtests, rank):
        with subtests.test(rank=rank):
            pass
        if rank == 1:
            dist.barrier()  # Rank 0 has reported the subtest of its teardown before rank 1 ends its call.


    @pytest.mark.xfail
    def test_expected_to_disagree(subtests, rank):
        with subtests.test("a"):
            if rank == 1:
                pytest.skip("by hand")


    class OwnReport(pytest.TestReport):
        pass


    @pytest.fixture
    def check(request):
        def check(right, outcome="failed"):
            if not right:
                item, text = request.node, "by hand" if outcome == "failed" else None
                report = OwnReport(item.nodeid, item.location, {}, outcome, text, "call")
                item.ihook.pytest_runtest_logreport(report=report)

        return check


    def test_check_fails(check, rank):
        check(rank == 0)


    def test_fails_after_a_check(check, rank):
        check(False, "passed")
        dist.barrier()
        assert rank == 0, "by hand"


    @pytest.fixture
    def fails_in_the_first_attempt(request):
        yield
        assert request.node.attempt == 2, "by hand"


    @pytest.mark.distributed(1)
    def test_runs_twice(fails_in_the_first_attempt):
        pass
    """

_CONFTEST = """
    import os

    from _pytest.runner import runtestprotocol


    def pytest_runtest_protocol(item, nextitem):
        if item.name == "test_runs_twice" and "RANK" in os.environ:
            for item.attempt in (1, 2):
                item._initrequest()
                runtestprotocol(item, nextitem=nextitem)
            return True
    """

_RESULTS = {
    "test_skips": "SUBFAILED FAILED",
    "test_fails": "SUBFAILED FAILED",
    "test_has_none": "SUBFAILED FAILED",
    "test_unittest_skips": "SUBFAILED SUBFAILED FAILED",
    "test_teardown": "PASSED SUBFAILED ERROR",
    "test_passes_at_different_times": "SUBPASSED PASSED SUBPASSED",
    "test_expected_to_disagree": "XFAIL",
    "test_check_fails": "FAILED FAILED",
    "test_fails_after_a_check": "PASSED FAILED",
    "test_runs_twice": "PASSED PASSED ERROR",
}


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="needs pytest's subtests")
@pytest.mark.long(except_for="alone")
@pytest.mark.parametrize("options", [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="xdist")])
def test_ranks_disagree_on_subtests_as_on_tests(suite: BackgroundSuite, options: tuple[str, ...]) -> None:
    suite.write("conftest.py", _CONFTEST)
    suite.write("test_parts.py", _TESTS)
    run = suite.run("--accel", "none", *options)
    run.expect(without_subtests(_RESULTS) if options else _RESULTS)
    shown = {
        "test_skips [a]": "rank 1: skipped: by hand",
        "test_has_none [a]": "the ranks disagree in this subtest: rank 1 did not report it, rank 0 ran",
        "test_fails [a]": "AssertionError: by hand",
        "test_runs_twice": "AssertionError: by hand",
        "test_check_fails": "contains 1 failed check",
    }
    for headline, text in shown.items():
        assert text in run.failure(headline)
