"""Tests of ranks that hang beyond the reach of signals, or that call different collectives."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES
from tests.torch_release import needs_torch


@pytest.mark.long
def test_a_rank_that_no_signal_can_interrupt_hangs_like_others(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write(
        "test_hangs.py",
        """
        import ctypes
        import os
        import signal

        import pytest

        impatient = pytest.mark.distributed(2, timeout=4, init=False)


        @impatient
        def test_native_call_holds_the_interpreter(rank):
            if rank == 1:
                ctypes.PyDLL(None).pause()
                while True:
                    ctypes.PyDLL(None).pause()


        @impatient
        def test_stopped(rank):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)


        @impatient
        def test_deaf_to_signals(rank):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while rank == 1:
                pass
        """,
    )
    run = suite.run("-n2", CAUSES)  # The ranks sleep most of the time.
    run.expect(
        {
            "test_native_call_holds_the_interpreter": "FAILED hung: phase timeout; rank 1",
            "test_stopped": "FAILED hung: phase timeout; rank 1",
            "test_deaf_to_signals": "FAILED hung: phase timeout; rank 1",
        }
    )
    name = "test_native_call_holds_the_interpreter"
    assert f" in {name}\n" in run.failure(name)


@pytest.mark.long
@needs_torch(2, 8)
def test_a_hang_names_the_collective_and_the_missing_ranks(suite: BackgroundSuite) -> None:
    """If the mark sets torch's debug mode, torch raises an error in each rank, and none hangs."""
    suite.write(
        "test_hangs.py",
        """
        import threading

        import pytest
        from tests.lazy_torch import dist, torch


        @pytest.mark.distributed(3, timeout=4)
        def test_one_is_elsewhere(rank):
            for _ in range(3):
                dist.all_reduce(torch.ones(4))
            if rank == 2:
                threading.Event().wait()
            dist.all_reduce(torch.ones(2, 3))


        @pytest.mark.distributed(2, timeout=4)
        def test_a_group_of_its_own(rank):
            group = dist.new_group([0, 1])
            if rank:
                threading.Event().wait()
            dist.broadcast(torch.ones(5, dtype=torch.int64), src=1, group=group)


        @pytest.mark.distributed(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        def test_debug_mode(rank):
            dist.broadcast(torch.ones(3), src=1) if rank else dist.all_reduce(torch.ones(8))
        """,
    )
    run = suite.run("--accel", "none", CAUSES)
    run.expect(
        {
            "test_one_is_elsewhere": "FAILED hung: phase timeout; rank 2",
            "test_a_group_of_its_own": "FAILED hung: phase timeout; rank 1",
            "test_debug_mode": "FAILED",
        }
    )
    expected = {
        "test_one_is_elsewhere": [
            "ranks 0-1 are in all_reduce #4 (float32[2, 3])",
            "rank 2 has not reached all_reduce #4 (last collective: all_reduce #3); "
            "is at test_hangs.py:13 in test_one_is_elsewhere",
        ],
        "test_a_group_of_its_own": [
            "rank 0 is in broadcast #1 (int64[5]) of process group 1",
            "rank 1 has not reached broadcast #1 (last collective: none); "
            "is at test_hangs.py:21 in test_a_group_of_its_own",
        ],
    }
    for test, lines in expected.items():
        report = run.failure(test)
        shown = report.partition(" collectives ")[2].splitlines()[1 : len(lines) + 1]
        assert len(shown) == len(lines), report
        for line, found in zip(lines, shown, strict=True):
            assert found.startswith(line), report
        assert "_pytest" not in report
        assert "flight" not in report
    report = run.failure("test_debug_mode")
    assert "Detected mismatch between collectives on ranks" in report
    assert "OpType=ALLREDUCE, TensorShape=[8]" in report
    assert "OpType=BROADCAST, TensorShape=[3]" in report
