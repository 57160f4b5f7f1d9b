"""Tests of messages between ranks that nobody has received when their test ends: no later test receives them."""

from __future__ import annotations

import re

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

SUITE = """
import threading
from datetime import timedelta

import pytest
from tests.lazy_torch import dist, torch

pytestmark = pytest.mark.distributed(2, backend="gloo", timeout=20)
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


def test_one_rank_receives(rank):
    if rank == 1:
        starts(dist.irecv, 0, 0)


def test_one_rank_receives_from_any(rank):
    if rank == 1:
        starts(dist.irecv, 0, None)


def test_sends_in_a_batch(rank):
    if rank == 0:
        tensors = [number(1), number(2), number(3)]
        KEPT.append((tensors, dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 1) for one in tensors])))
    else:
        dist.recv(number(), 0)


def test_sends_with_another_tag(rank):
    starts(dist.isend if rank == 0 else dist.irecv, 1, 1 - rank, tag=rank)


def test_sends_in_a_thread(rank):
    thread = threading.Thread(target=starts, args=(dist.isend, 1, 1 - rank))
    thread.start()
    thread.join()


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


def test_receives_before_it_sends(rank):
    work = starts(dist.irecv, 0, 1 - rank)
    dist.send(number(1), 1 - rank)
    work.wait()


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


@pytest.mark.distributed(3, backend="gloo", timeout=20)
def test_one_rank_sends_to_all_others(rank):
    if rank == 0:
        for peer in (1, 2):
            dist.send(number(peer), peer)
    else:
        received = number()
        dist.recv(received, None if rank == 2 else 0)
        assert received.item() == rank


@pytest.mark.distributed(3, backend="gloo", timeout=20)
def test_two_ranks_send_and_one_is_not_heard(rank):
    if rank == 2:
        dist.recv(number(), None)
    else:
        starts(dist.isend, 1, 2)


@pytest.fixture(scope="class")
def sent(rank):
    starts(dist.isend, 5, 1 - rank)


@pytest.mark.usefixtures("sent")
class TestWiderFixture:
    def test_does_not_look(self):
        dist.barrier()

    def test_receives(self, rank):
        received = number()
        dist.recv(received, 1 - rank)
        assert received.item() == 5

    def test_sends_one_more_than_the_fixture(self, rank):
        if rank == 0:
            starts(dist.isend, 6, 1)


@pytest.fixture(scope="class")
def service(rank):
    def serve():
        received = number()
        while received.item() >= 0:
            dist.recv(received, 0, tag=1)
            began.set()

    began = threading.Event()
    thread = threading.Thread(target=serve)
    if rank == 1:
        thread.start()
        began.wait()
    else:
        dist.send(number(), 1, tag=1)
    yield
    if rank == 0:
        dist.send(number(-1), 1, tag=1)
    else:
        thread.join()


@pytest.mark.usefixtures("service")
class TestService:
    @pytest.mark.parametrize("count", range(3))
    def test_sends_without_waiting(self, rank, count):
        if rank == 0:
            for value in range(count):
                starts(dist.isend, value, 1, tag=1)


def test_last(rank):
    received = [None, None]
    dist.all_gather_object(received, rank)
    assert received == [0, 1]
"""

UNMET = "a message between ranks (send, recv) has not been received, or has not been sent"
NEW_RANKS = {
    **dict.fromkeys(
        [
            *("test_sends", "test_one_rank_receives", "test_one_rank_receives_from_any", "test_sends_in_a_batch"),
            *("test_sends_with_another_tag", "test_sends_in_a_thread", "test_sends_in_a_subgroup"),
            *("test_two_ranks_send_and_one_is_not_heard", "TestWiderFixture::test_does_not_look"),
            "TestWiderFixture::test_sends_one_more_than_the_fixture",
        ],
        UNMET,
    ),
    "test_receives_in_vain": "an operation of torch.distributed failed",
}


def test_no_test_receives_a_message_of_another_one(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", SUITE)
    run = suite.run("--accel", "none", "-p", "no:randomly", CAUSES)
    tests = re.findall(r"def (test_\w+)", SUITE.replace("test_sends_without_waiting", ""))
    tests += [f"test_sends_without_waiting[{count}]" for count in range(3)]
    run.expect(
        dict.fromkeys(tests, "PASSED") | {"test_one_rank_makes_a_group": "PASSED ERROR disagreed: process groups"}
    )
    _, title, rest = run.text.partition("accel: tests after which new ranks were started")
    assert title, run.text
    reasons = dict(line.split(": ", 1) for line in rest.partition("\n===")[0].splitlines()[1:])
    for test, reason in NEW_RANKS.items():
        assert reasons[f"test_it.py::{test}"].startswith(reason)
    assert not any("healthy" in test or "arrive" in test or "to_all_others" in test for test in reasons)
