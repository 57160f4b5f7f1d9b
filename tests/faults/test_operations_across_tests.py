"""Tests of operations of torch.distributed that a test starts and does not complete: no later test sees them."""

from __future__ import annotations

import re

from tests.background_suite import BackgroundSuite
from tests.deadline import scaled
from tests.run import CAUSES

MESSAGES = """
from datetime import timedelta

import pytest
from tests.lazy_torch import dist, torch

pytestmark = pytest.mark.distributed(2, backend="gloo", timeout=120)
KEPT = []


def number(value=0.0):
    return torch.full((1,), float(value))


def starts(operation, value, peer, **options):
    tensor = number(value)
    work = operation(tensor, peer, **options)
    KEPT.append((tensor, work))
    return work


def test_sends(rank):
    starts(dist.isend, 7, 1 - rank)


def test_expects_its_own_message(rank):
    work, received = starts(dist.isend, 9, 1 - rank), number()
    dist.recv(received, 1 - rank)
    work.wait()
    assert received.item() == 9


def test_one_rank_receives_from_any(rank):
    if rank == 1:
        starts(dist.irecv, 0, None)


def test_sends_in_a_batch(rank):
    if rank == 0:
        tensors = [number(1), number(2), number(3)]
        KEPT.append((tensors, dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 1) for one in tensors])))
    else:
        dist.recv(number(), 0)


@pytest.fixture(scope="module")
def pair():
    return dist.new_group()


def test_sends_in_a_subgroup(rank, pair):
    if rank == 1:
        starts(dist.isend, 1, None, group=pair, group_dst=0)


def test_one_rank_makes_a_group(rank):
    if rank == 0:
        dist.destroy_process_group(dist.new_group([0]))


# Healthy tests


def test_messages_that_arrive(rank, pair):
    for group in (None, pair):
        for tag in (0, 3):
            work = starts(dist.isend, 1, 1 - rank, group=group, tag=tag)
            dist.recv(number(), 1 - rank if tag else None, group=group, tag=tag)
            work.wait()
    operations = [dist.P2POp(dist.isend, number(1), 1 - rank), dist.P2POp(dist.irecv, number(), 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    objects = ["x"]
    dist.send_object_list(objects, 1) if rank == 0 else dist.recv_object_list(objects, 0)


def test_receives_in_vain(rank):
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.irecv(number(), 1).wait(timedelta(milliseconds=50))


def test_leaves_messages_in_its_own_group(rank):
    group = dist.new_group()
    if rank == 0:
        starts(dist.isend, 1, 1, group=group)
    dist.barrier()
    if rank == 0:
        del KEPT[:]
    dist.destroy_process_group(group)


@pytest.fixture(scope="class")
def sent(rank):
    starts(dist.isend, 5, 1 - rank)


@pytest.mark.usefixtures("sent")
class TestSent:
    def test_does_not_look(self):
        dist.barrier()

    def test_receives(self, rank):
        received = number()
        dist.recv(received, 1 - rank)
        assert received.item() == 5

    def test_sends_one_more_than_the_fixture(self, rank):
        if rank == 0:
            starts(dist.isend, 6, 1)


def test_last_message(rank):
    received = [None, None]
    dist.all_gather_object(received, rank)
    assert received == [0, 1]
"""
COLLECTIVES = """
from datetime import timedelta

import pytest
from tests.lazy_torch import dist, torch

pytestmark = pytest.mark.distributed(2, backend="gloo", timeout=120)


def ones(number=3):
    return torch.ones(number)


def each_expects_the_other(rank, group=None):
    return dist.broadcast(ones(), src=1 - rank, group=group, async_op=True)


def impatient_group():
    group = dist.new_group()  # With the short timeout, it would be an error if a rank came here later than another.
    dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=50), group)
    return group


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
class TestStarted:
    def test_joins_what_the_fixture_started(self, rank):
        if rank == 1:
            dist.all_reduce(ones())


def test_last_collective():
    dist.barrier()
"""

UNMET = "a message between ranks (send, recv) has not been received, or has not been sent"
NEW_RANKS = {
    **dict.fromkeys(
        [
            *("test_sends", "test_one_rank_receives_from_any", "test_sends_in_a_batch", "test_sends_in_a_subgroup"),
            *("TestSent::test_does_not_look", "TestSent::test_sends_one_more_than_the_fixture"),
        ],
        UNMET,
    ),
    "test_receives_in_vain": "an operation of torch.distributed failed",
}
ERRORS = {
    "test_one_rank_makes_a_group": "disagreed: process groups",
    "test_does_not_complete": "failed: unawaited collective",
    "test_does_not_see_the_failure": "failed: unawaited collective",
    "test_one_rank": "disagreed: collectives",
}


def test_no_test_sees_the_operations_of_another_one(suite: BackgroundSuite) -> None:
    suite.write("test_messages.py", MESSAGES)
    suite.write("test_collectives.py", COLLECTIVES)
    # In this time, a busy rank also starts the collectives that another did not wait for.
    suite.write("conftest.py", f"from pytest_accel.rank import operations\noperations._LIMIT = {scaled(2)}\n")
    run = suite.run("--accel", "none", "-p", "no:randomly", CAUSES, "test_collectives.py", "test_messages.py")
    tests = re.findall(r"def (test_\w+)", MESSAGES + COLLECTIVES)
    expected = {test: f"PASSED ERROR {ERRORS[test]}" if test in ERRORS else "PASSED" for test in tests}
    # gloo aborts, or crashes while it does so, before or after the end of the call.
    death = run.causes["test_different_shapes"]
    assert death in ("died: SIGABRT; rank 0", "died: SIGSEGV; rank 0")
    in_call = run.outcomes()["test_different_shapes"] == "FAILED"
    expected["test_different_shapes"] = f"{'FAILED' if in_call else 'PASSED ERROR'} {death}"
    run.expect(expected)
    at = "dist.broadcast at test_collectives.py:15, for which the test did not wait, "
    assert f"ranks 0-1: {at}has not completed" in run.failure("test_does_not_complete")
    assert f"{at}failed: " in run.failure("test_does_not_see_the_failure")
    _, title, rest = run.text.partition("accel: tests after which new ranks were started")
    assert title, run.text
    reasons = dict(line.split(": ", 1) for line in rest.partition("\n===")[0].splitlines()[1:])
    for test, reason in NEW_RANKS.items():
        assert reasons[f"test_messages.py::{test}"].startswith(reason)
    assert not any("arrive" in test for test in reasons)
