"""The core rows of the verdict matrix: a test for each outcome, and its verdict, the same over each transport."""

from __future__ import annotations

import pytest

TESTS = """
    import os
    import signal
    import time
    import unittest

    import pytest
    from tests.lazy_torch import dist, torch

    distributed, devices = pytest.mark.distributed, pytest.mark.devices


    @devices(2)
    def test_two_devices(devices, accel):
        assert len(devices) == 2


    @pytest.mark.parametrize("value", [1, 2])
    @distributed(2)
    def test_sum(value, rank, device):
        total = torch.ones(1, device=device) * value
        dist.all_reduce(total)
        assert total.item() == 2 * value


    @distributed(2, backend="gloo")
    @devices(share=0.5)
    def test_shares(accel):
        assert len(accel.ids) == 1
        dist.barrier()


    @distributed(2)
    def test_fails_on_one_rank(rank):
        assert rank == 0


    @distributed(2)
    def test_exits_on_one_rank(rank):
        if rank == 1:
            os._exit(0)
        dist.barrier()


    @distributed(2)
    def test_killed_on_one_rank(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()


    @distributed(2)
    def test_ends_as_announced(faults, rank):
        faults.kill(1, at="barrier")
        with pytest.raises(RuntimeError):
            dist.barrier()


    @distributed(2)
    def test_ends_otherwise_than_announced(faults, rank):
        faults.expect_exit(1, status=3)
        if rank == 1:
            os._exit(0)


    @distributed(2, timeout=6)
    def test_hangs_on_one_rank(rank):
        if rank == 1:
            time.sleep(1000)
        dist.barrier()


    @distributed(2)
    def test_skipped_by_one_rank(rank):
        if rank == 1:
            pytest.skip("by hand")


    class TestOfUnittest(unittest.TestCase):
        @distributed(2)
        def test_part_skipped_by_one_rank(self):
            with self.subTest("part"):
                if dist.get_rank() == 1:
                    self.skipTest("by hand")


    @distributed(2)
    def test_skipped():
        pytest.skip("by hand")


    @pytest.mark.xfail(strict=True)
    @distributed(2)
    def test_expected_to_fail(rank):
        assert rank == 0


    @pytest.fixture
    def is_marked_too_late(request):
        request.node.add_marker(distributed(2))


    def test_marked_too_late(is_marked_too_late):
        pass


    @pytest.mark.parametrize("tail", ["b-c", "c"])
    @pytest.mark.parametrize("head", ["a", "a-b"])
    @distributed(2)
    def test_twins(head, tail):
        assert (head, tail) != ("a", "b-c")


    SENT = []


    @distributed(2, backend="gloo")
    def test_message_that_nobody_receives(rank):
        value = torch.full((1,), 7.0)
        SENT.append((value, dist.isend(value, 1 - rank)))


    @distributed(2, backend="gloo")
    def test_message_of_its_own(rank):
        value, received = torch.full((1,), 9.0), torch.zeros(1)
        work = dist.isend(value, 1 - rank)
        dist.recv(received, 1 - rank)
        work.wait()
        assert received.item() == 9


    @devices(9)
    def test_too_large():
        pass


    def test_unmarked():
        pass
    """
VERDICTS = {  # With the causes that a session with the option `CAUSES` reports.
    "test_two_devices": "PASSED",
    "test_sum[1]": "PASSED",
    "test_sum[2]": "PASSED",
    "test_shares": "PASSED",
    "test_fails_on_one_rank": "FAILED failed: AssertionError; rank 1",
    "test_exits_on_one_rank": "FAILED died: status 0; rank 1",
    "test_killed_on_one_rank": "FAILED died: SIGKILL; rank 0",
    "test_ends_as_announced": "PASSED",
    "test_ends_otherwise_than_announced": "FAILED died: status 0; rank 1",
    "test_hangs_on_one_rank": "FAILED hung: phase timeout; rank 1",
    "test_skipped_by_one_rank": "FAILED disagreed: skip",
    "test_part_skipped_by_one_rank": "SUBFAILED FAILED" if pytest.version_tuple >= (9,) else "FAILED",
    "test_skipped": "SKIPPED",
    "test_expected_to_fail": "XFAIL",
    "test_marked_too_late": "FAILED",
    "test_twins[a-b-c]": "FAILED PASSED",
    "test_twins[a-c]": "PASSED",
    "test_twins[a-b-b-c]": "PASSED",
    "test_message_that_nobody_receives": "PASSED",
    "test_message_of_its_own": "PASSED",
    "test_too_large": "SKIPPED",
    "test_unmarked": "PASSED",
}
