"""Tests of messages between ranks that cross the end of a test. Rows beside those of the verdict matrix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.background_suite import PYTEST, TORCHRUN
from tests.run import CAUSES

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite

SUITE = """
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv

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
        KEPT.append((tensors, batch_isend_irecv([P2POp(dist.isend, one, 1) for one in tensors])))
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
    operations = [P2POp(dist.isend, number(1), 1 - rank), P2POp(dist.irecv, number(), 1 - rank)]
    for work in batch_isend_irecv(operations):
        work.wait()
    objects = ["x"]
    dist.send_object_list(objects, 1) if rank == 0 else dist.recv_object_list(objects, 0)


def test_receives_before_it_sends(rank):
    work = starts(dist.irecv, 0, 1 - rank)
    dist.send(number(1), 1 - rank)
    work.wait()


def test_refused_messages_do_not_count(rank):
    with pytest.raises(TypeError):
        dist.group.WORLD.send([number()], 1 - rank, "no tag")


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


def test_groups_of_some_ranks(rank):
    dist.destroy_process_group(dist.new_group([rank], use_local_synchronization=True))


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
def test_waits_in_a_monitored_barrier():
    dist.monitored_barrier()


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


def store():
    return dist.distributed_c10d._get_default_store()


def test_sets_a_key():
    dist.PrefixStore("of", store()).set("a test", "1")


@pytest.fixture(scope="class")
def key():
    store().set("of a fixture", "1")


@pytest.mark.usefixtures("key")
class TestKeys:
    def test_has_no_key_of_another_test(self):
        assert not dist.PrefixStore("of", store()).check(["a test"])

    def test_deletes_its_key(self, rank):
        store().add(f"rank {rank}", 1)
        store().delete_key(f"rank {rank}")
        KEPT.append("still here")

    def test_has_the_key_of_the_fixture_in_the_same_process(self):
        assert store().get("of a fixture") == b"1"
        assert "still here" in KEPT


def test_last(rank):
    received = [None, None]
    dist.all_gather_object(received, rank)
    assert received == [0, 1]
"""

SENT_BY_0 = "rank 0 sent 1 message to rank 1 that rank 1 did not receive"
SENT_BY_1 = "rank 1 sent 1 message to rank 0 that rank 0 did not receive"
AWAITED = "rank 1 waits for 1 message from rank 0 that rank 0 did not send"
ERRORS = {
    "test_sends": [f"{SENT_BY_0}: dist.isend at test_it.py:20", f"{SENT_BY_1}: dist.isend at test_it.py:20"],
    "test_one_rank_receives": [AWAITED],
    "test_one_rank_receives_from_any": ["rank 1 waits for 1 message that no rank sent"],
    "test_sends_in_a_batch": [": dist.batch_isend_irecv at test_it.py:49"],
    "test_sends_with_another_tag": [SENT_BY_0, AWAITED],
    "test_sends_in_a_thread": [SENT_BY_1],
    "test_sends_in_a_subgroup": [f"{SENT_BY_1} in process group 1"],
    "test_two_ranks_send_and_one_is_not_heard": ["ranks 0-1 sent 1 message to rank 2"],
    "test_sends_one_more_than_the_fixture": [SENT_BY_0],
    "test_one_rank_makes_a_group": [],
}


@pytest.mark.long(except_for="alone")
@pytest.mark.parametrize(
    ("options", "program"),
    [
        pytest.param((), PYTEST, id="alone"),
        pytest.param(("-n", "2", "--dist", "loadscope"), PYTEST, id="workers"),
        pytest.param((), TORCHRUN, id="torchrun"),
    ],
)
def test_messages_without_a_counterpart_are_an_error_of_their_test(
    suite: BackgroundSuite, options: tuple[str, ...], program: tuple[str, ...]
) -> None:
    # Workers exchange their worlds.
    suite.write("test_it.py", SUITE.replace('assert "still here" in KEPT', "pass") if options else SUITE)
    run = suite.start("--accel", "none", "-p", "no:randomly", CAUSES, *options, program=program).finish()
    tests = re.findall(r"def (test_\w+)", SUITE.replace("test_sends_without_waiting", ""))
    tests += [f"test_sends_without_waiting[{count}]" for count in range(3)]
    verdicts = {test: "PASSED ERROR disagreed: messages" if test in ERRORS else "PASSED" for test in tests}
    run.expect(verdicts | {"test_one_rank_makes_a_group": "PASSED ERROR disagreed: process groups"})
    for test, lines in ERRORS.items():
        report = run.failure(f"TestWiderFixture.{test}" if "fixture" in test else test)
        for line in lines:
            assert line in report
    suite.expect_nothing_left()
