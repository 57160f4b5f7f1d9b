"""Tests of subtests, and of checks that do not end a test, that end differently on the ranks of a world."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite

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


    """

_RESULTS = {
    "test_skips": "SUBFAILED FAILED",
    "test_fails": "SUBFAILED FAILED",
    "test_has_none": "SUBFAILED FAILED",
    "test_unittest_skips": "SUBFAILED SUBFAILED FAILED",
    "test_teardown": "PASSED SUBFAILED ERROR",
    "test_passes_at_different_times": "SUBPASSED PASSED SUBPASSED",
    "test_expected_to_disagree": "XFAIL",
}


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="needs pytest's subtests")
def test_ranks_disagree_on_subtests_as_on_tests(suite: BackgroundSuite) -> None:
    suite.write("test_parts.py", _TESTS)
    run = suite.run("--accel", "none")
    run.expect(_RESULTS)
    shown = {
        "test_skips [a]": "rank 1: skipped: by hand",
        "test_has_none [a]": "the ranks disagree in this subtest: rank 1 did not report it, rank 0 ran",
        "test_fails [a]": "AssertionError: by hand",
    }
    for headline, text in shown.items():
        assert text in run.failure(headline)
