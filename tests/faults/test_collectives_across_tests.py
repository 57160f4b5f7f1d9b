"""Tests of collectives that a test starts and does not wait for."""

from __future__ import annotations

import re

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

SUITE = """
from datetime import timedelta

import pytest
from tests.lazy_torch import dist, torch

pytestmark = pytest.mark.distributed(2, backend="gloo", timeout=20)


def ones(number=3):
    return torch.ones(number)


def each_expects_the_other(rank, group=None):
    return dist.broadcast(ones(), src=1 - rank, group=group, async_op=True)


def impatient_group():
    return dist.new_group(timeout=timedelta(milliseconds=50))


def test_does_not_wait():
    for number in (1, 100_000):
        dist.all_reduce(ones(number), async_op=True)
    dist.barrier(async_op=True)


def test_is_in_the_same_process(rank):
    counts = [None, None]
    dist.all_gather_object(counts, dist.group.WORLD._get_sequence_number_for_group())
    assert counts == [3, 3]


def test_waits(rank):
    received = ones()
    work = dist.all_reduce(received, async_op=True)
    dist.barrier()
    work.wait()
    assert received.tolist() == [2, 2, 2]


def test_expects_the_failure(rank):
    group = impatient_group()
    work = each_expects_the_other(rank, group)
    with pytest.raises(RuntimeError):
        work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


def test_different_shapes(rank):
    dist.all_reduce(ones(3 + 1000 * rank), async_op=True)


def test_after_different_shapes():
    dist.barrier()


def test_does_not_complete(rank):
    each_expects_the_other(rank)


def test_after_one_that_does_not_complete():
    dist.barrier()


def test_does_not_see_the_failure(rank):
    group = impatient_group()
    work = each_expects_the_other(rank, group)
    while not work.is_completed():
        pass
    dist.barrier()
    dist.destroy_process_group(group)


def test_one_rank(rank):
    if rank == 0:
        dist.all_reduce(ones(), async_op=True)


@pytest.fixture(scope="class")
def started(rank):
    return dist.all_reduce(ones(), async_op=True) if rank == 0 else None


@pytest.mark.usefixtures("started")
class TestWiderFixture:
    def test_joins_what_the_fixture_started(self, rank):
        if rank == 1:
            dist.all_reduce(ones())


def test_last():
    dist.barrier()
"""
ERRORS = {
    "test_does_not_complete": "failed: unawaited collective",
    "test_does_not_see_the_failure": "failed: unawaited collective",
    "test_one_rank": "disagreed: collectives",
}


def test_collectives_for_which_a_test_does_not_wait_are_judged_with_it(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", SUITE)
    run = suite.start("--accel", "none", "-p", "no:randomly", CAUSES).finish()
    tests = re.findall(r"def (test_\w+)", SUITE)
    expected = {test: f"PASSED ERROR {ERRORS[test]}" if test in ERRORS else "PASSED" for test in tests}
    # gloo aborts, or crashes while it does so, before or after the end of the call.
    death = run.causes["test_different_shapes"]
    assert death in ("died: SIGABRT; rank 0", "died: SIGSEGV; rank 0")
    in_call = run.outcomes()["test_different_shapes"] == "FAILED"
    expected["test_different_shapes"] = f"{'FAILED' if in_call else 'PASSED ERROR'} {death}"
    run.expect(expected)
    at = "dist.broadcast at test_it.py:15, for which the test did not wait, "
    assert f"ranks 0-1: {at}has not completed" in run.failure("test_does_not_complete")
    assert f"{at}failed: " in run.failure("test_does_not_see_the_failure")
