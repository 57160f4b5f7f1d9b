"""Tests of ranks that wait in collectives that can never complete, and of others that only seem to."""

from __future__ import annotations

import re

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES
from tests.torch_release import needs_torch


@needs_torch(2, 8)
def test_a_deadlock_ends_long_before_the_timeout(suite: BackgroundSuite) -> None:
    suite.write(
        "test_deadlocks.py",
        """
        import os
        import time

        import psutil
        import pytest
        from tests.lazy_torch import dist, torch


        @pytest.mark.distributed(2)
        def test_one_rank_has_finished(rank):
            if rank == 0:
                dist.barrier()


        @pytest.mark.distributed(2)
        def test_other_operation(rank):
            dist.barrier() if rank == 0 else dist.all_reduce(torch.ones(1))


        @pytest.mark.distributed(2)
        def test_other_size(rank):
            dist.all_reduce(torch.ones(3 + rank))


        @pytest.mark.distributed(3)
        def test_circle(rank):
            groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
            dist.barrier()
            dist.barrier([groups[0], groups[1], groups[2]][rank])


        @pytest.fixture
        def barrier_at_the_end(rank):
            yield
            if rank == 1:
                work = dist.all_reduce(torch.ones(1), async_op=True)
                work.wait()


        @pytest.mark.distributed(2)
        def test_teardown(barrier_at_the_end):
            dist.all_reduce(torch.ones(1))


        @pytest.mark.distributed(2)
        def test_receive(rank, gather):
            waiting = psutil.Process(gather(os.getpid())[1])
            for _ in range(2 + rank):
                dist.recv(torch.ones(1), src=0) if rank else dist.send(torch.ones(1), dst=1)
            time.sleep(0.5)  # Until rank 1 waits for the last message.
            waiting.suspend()  # As by Ctrl-Z.
            while waiting.status() != psutil.STATUS_STOPPED:
                pass
            waiting.resume()


        @pytest.mark.distributed(2)
        def test_other_tag(rank):
            dist.recv(torch.ones(1), src=0, tag=1) if rank else dist.send(torch.ones(1), dst=1, tag=2)


        @pytest.mark.distributed(2)
        def test_gather(rank, gather):
            gather(rank)
            if rank == 0:
                gather(rank)
        """,
    )
    # Each of the tests is looked at for several seconds, in which its ranks sleep.
    run = suite.start("-n2", "--accel=sim:6", CAUSES).finish(timeout=240)
    run.expect(
        {
            "test_one_rank_has_finished": "FAILED hung: deadlock; rank 0",
            "test_other_operation": "FAILED hung: deadlock; ranks 0-1",
            "test_other_size": "FAILED hung: deadlock; rank 1",
            "test_circle": "FAILED hung: deadlock; ranks 0-2",
            "test_teardown": "PASSED ERROR hung: deadlock; rank 1",
            "test_receive": "FAILED hung: deadlock; rank 1",
            "test_other_tag": "FAILED hung: deadlock; ranks 0-1",
            "test_gather": "FAILED hung: deadlock; rank 0",
        }
    )
    finished = "has finished the test\n"
    for name, message in (
        ("one_rank_has_finished", f"rank 0 is stuck in barrier #1 at test_deadlocks.py:13; rank 1 {finished}"),
        ("other_size", "called all_reduce #1 with different shapes: rank 0 float32[3], rank 1 float32[4]\n"),
        ("receive", f"for message #3 from rank 0 (tag 0), which has sent 2; rank 0 {finished}"),
        ("other_tag", "for rank 1 to receive message #1 (tag 2), which has received none; rank 1 waits at "),
        ("other_tag", "for message #1 from rank 0 (tag 1), which has sent none\n"),
        ("gather", f"for gather #2 of rank 1, which has made 1; rank 1 {finished}"),
    ):
        assert re.search(f"\nE   deadlock: .*{re.escape(message)}", run.failure(f"test_{name}"))
    assert "\nrank 0 is in barrier #1 of process group 1\n" in run.failure("test_circle")


@pytest.mark.long
def test_ranks_that_can_go_on_are_in_no_deadlock(suite: BackgroundSuite) -> None:
    suite.write(
        "test_healthy.py",
        """
        import os
        import signal
        import subprocess
        import sys
        import threading
        import time
        from concurrent.futures import ThreadPoolExecutor
        from datetime import timedelta

        import pytest
        from tests.lazy_torch import dist, torch

        SECONDS = 5  # Longer than it takes to find a deadlock.
        CONTINUE = (
            "import psutil, sys, time; stopped = psutil.Process(int(sys.argv[1]))\\n"
            "while stopped.status() != psutil.STATUS_STOPPED: time.sleep(0.1)\\n"
            "time.sleep(int(sys.argv[2])); stopped.resume()"
        )


        @pytest.mark.distributed(2)
        def test_the_group_has_a_short_timeout(rank):
            group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
            if rank == 0:
                with pytest.raises(RuntimeError):
                    dist.all_reduce(torch.ones(1), group=group)


        @pytest.mark.distributed(3)
        def test_one_rank_waits_for_the_store(rank, dist_store):
            if rank == 1:
                dist_store.get("key")
            elif rank == 2:
                time.sleep(SECONDS)
                dist_store.set("key", "value")
            dist.barrier()


        @pytest.mark.distributed(2)
        def test_one_rank_is_stopped(rank):
            if rank == 1:
                with subprocess.Popen([sys.executable, "-c", CONTINUE, str(os.getpid()), str(SECONDS)]):
                    os.kill(os.getpid(), signal.SIGSTOP)
            dist.barrier()


        @pytest.mark.distributed(2)
        def test_a_thread_joins_the_collective(rank):
            if rank == 0:
                dist.barrier()
            else:
                thread = threading.Timer(SECONDS, dist.barrier)
                thread.start()
                thread.join()


        @pytest.mark.distributed(2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
        def test_torch_itself_finds_a_mismatch(rank):
            with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks"):
                dist.broadcast(torch.ones(3), src=1) if rank else dist.all_reduce(torch.ones(8))


        @pytest.mark.distributed(2, init=False)
        def test_no_rank_gets_a_signal_without_a_group():
            time.sleep(SECONDS)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())


        @pytest.mark.distributed(4)
        def test_other_groups_can_go_on(rank):
            pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
            if rank == 3:
                time.sleep(SECONDS)
            dist.barrier(pairs[rank // 2])
            dist.barrier()


        @pytest.fixture(scope="session")
        def pool():
            with ThreadPoolExecutor(1) as executor:
                executor.submit(int).result()
                yield executor


        @pytest.mark.distributed(2)
        def test_a_rank_that_has_finished_sends(rank, pool):
            if rank == 0:
                dist.recv(torch.ones(1), src=1)
            else:
                pool.submit(lambda: (time.sleep(SECONDS), dist.send(torch.ones(1), dst=0)))


        @pytest.mark.distributed(2)
        def test_one_rank_receives_late(rank):
            if rank == 0:
                sent = dist.isend(torch.ones(1), dst=1)
                summed = dist.all_reduce(torch.ones(1), async_op=True)
                time.sleep(SECONDS)
                sent.wait()
                summed.wait()
                dist.recv(torch.ones(1))
            else:
                dist.all_reduce(torch.ones(1))
                dist.recv(torch.ones(1), src=0)
                dist.send(torch.ones(1), dst=0)


        @pytest.fixture
        def barrier_in_teardown(rank):
            yield
            if rank == 1:
                time.sleep(SECONDS)
                dist.barrier()


        @pytest.mark.distributed(2)
        def test_the_other_rank_is_in_its_teardown(rank, barrier_in_teardown):
            if rank == 0:
                dist.barrier()
        """,
    )
    run = suite.start("-n5", "--accel=sim:12").finish(timeout=180)  # The tests take 5 seconds each.
    assert "deadlock" not in run.text
    # Groups that are left, and different numbers of collectives, are errors of the test's end.
    errors = ("test_the_group_has_a_short_timeout", "test_other_groups_can_go_on")
    run.expect({name: "PASSED ERROR" if name in errors else "PASSED" for name in run.outcomes()})
    assert len(run.outcomes()) == 10
