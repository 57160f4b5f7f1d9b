"""Tests of subtests that end differently on the ranks of a world."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite

_TESTS = """
    import os
    import unittest

    import pytest

    pytestmark = pytest.mark.distributed(2, init=False)


    def test_skips(subtests, rank):
        with subtests.test("a"):
            if rank == 1:
                pytest.skip("by hand")


    def test_has_none(subtests, rank):
        if rank == 0:
            with subtests.test("a"):
                pass


    class TestOfUnittest(unittest.TestCase):
        def test_unittest_skips(self):
            for name in "ab":
                with self.subTest(name):
                    if os.environ["RANK"] == "1":
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
    def ends_earlier_on_rank_0(subtests, rank, gather):
        yield
        with subtests.test("late"):
            pass
        if rank == 0:
            gather(None)


    def test_passes_at_different_times(ends_earlier_on_rank_0, subtests, rank, gather):
        with subtests.test(rank=rank):
            pass
        if rank == 1:
            gather(None)  # Rank 0 has reported the subtest of its teardown before rank 1 ends its call.
    """

_RESULTS = {
    "test_skips": "SUBFAILED FAILED",
    "test_has_none": "SUBFAILED FAILED",
    "test_unittest_skips": "SUBFAILED SUBFAILED FAILED",
    "test_teardown": "PASSED SUBFAILED ERROR",
    "test_passes_at_different_times": "SUBPASSED PASSED SUBPASSED",
}


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="needs pytest's subtests")
def test_ranks_disagree_on_subtests_as_on_tests(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write("test_parts.py", _TESTS)
    run = suite.run("--accel", "none")
    run.expect(_RESULTS)
    assert "rank 1: skipped: by hand" in run.failure("test_skips [a]")
