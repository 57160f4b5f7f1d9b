"""Tests of the channel between an xdist worker and the pool: an error there fails waiting requests with the reason."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pytest_accel.core.record_events import Recorders
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.lease_request import MachineLease
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_client import PoolClient
from pytest_accel.pool.pool_messages import (
    Answer,
    CancelRequest,
    DriverMessage,
    PoolError,
    ReleaseWorld,
    SubmitDemand,
    WarmServer,
    WatchExit,
    WorldGrant,
)
from pytest_accel.pool.pool_service import serve
from pytest_accel.pool.pooled_world import WantedObserver, WorldRequest

DEMAND = WorldDemand(cast(WorldKey, None), Holder.here("a test"))


class FakeChannel:
    """A fake channel; `sent` has the messages that were sent through it."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.receive: Callable[[Any], None] = print

    def send(self, item: object) -> None:
        assert isinstance(item, bytes)
        self.sent.put(pickle.loads(item))

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None:
        self.receive = callback


class BrokenPool:
    """A fake pool whose methods raise IndexError, except `fail`, which records the reasons."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, why: str) -> None:
        self.failed.append(why)

    def __getattr__(self, name: str) -> Any:
        raise IndexError(f"met in {name}")


def send(channel: FakeChannel, message: DriverMessage) -> None:
    channel.receive(pickle.dumps(message))


def test_an_error_in_a_request_fails_the_pool_and_all_waiting_requests() -> None:
    channel, pool = FakeChannel(), BrokenPool()
    channel.setcallback(serve(channel, lambda: cast(Pool, pool), print, print).receive, endmarker=None)
    send(channel, SubmitDemand(7, DEMAND))
    answer = channel.sent.get(timeout=30)
    assert isinstance(answer, Answer)
    assert answer.number == 7
    assert isinstance(answer.value, PoolError)
    assert "IndexError: met in acquire" in str(answer.value)
    send(channel, WatchExit(8, 1, 0))
    assert channel.sent.get(timeout=30).number == 8
    send(channel, ReleaseWorld(1, None, frozenset(), retire=False))
    channel.receive(None)
    assert [why.splitlines()[-1] for why in pool.failed] == [
        f"IndexError: met in {name}" for name in ("acquire", "watch_exit", "release", "driver_lost")
    ]


def test_each_request_fails_if_the_pool_cannot_be_created() -> None:
    def create() -> Pool:
        raise OSError("no space for the session's folder")

    channel = FakeChannel()
    channel.setcallback(serve(channel, create, print, print).receive, endmarker=None)
    send(channel, WarmServer())
    for number in (1, 2):
        send(channel, SubmitDemand(number, DEMAND))
        answer = channel.sent.get(timeout=30)
        assert answer.number == number
        assert "OSError: no space for the session's folder" in str(answer.value)
    channel.receive(None)
    assert channel.sent.empty()


def test_an_error_in_a_grant_fails_its_request_first() -> None:
    """The grant runs in a thread of the broker. Only `_granted` can answer the request, also if `give_back` raises."""
    pool = object.__new__(Pool)
    leases = SimpleNamespace(release_place=print)
    vars(pool).update(_manager=BrokenPool(), _leases=leases, _requests={}, _record=Recorders())
    answers: list[object] = []
    request = WorldRequest(1, DEMAND, cast(WantedObserver, None), answers.append)
    with pytest.raises(IndexError, match="met in give_back"):
        pool._granted(request, {0: cast(MachineLease, BrokenPool())}, None)
    assert isinstance(answers[0], PoolError)
    assert "IndexError: met in closing" in str(answers[0])


def test_an_invalid_answer_fails_the_waiting_request() -> None:
    channel = FakeChannel()
    client = PoolClient.over(channel)
    errors: queue.SimpleQueue[PoolError] = queue.SimpleQueue()

    def acquire() -> None:
        with pytest.raises(PoolError) as caught:
            client.acquire(DEMAND, None)
        errors.put(caught.value)

    thread = threading.Thread(target=acquire)
    thread.start()
    assert channel.sent.get(timeout=30) == SubmitDemand(1, DEMAND)
    with pytest.raises(pickle.UnpicklingError):
        channel.receive(b"garbage")
    assert "UnpicklingError" in str(errors.get(timeout=30))
    thread.join()


@pytest.mark.parametrize("late", [False, True])
def test_a_world_that_is_granted_while_the_wait_is_interrupted_is_returned(late: bool) -> None:
    spec = WorldSpec(3, WorldKey("cpu", None, 1, grouped=True))
    answer = Answer(1, WorldGrant(spec, (1,), "/", False, 0.0, ()))

    class InterruptingChannel(FakeChannel):
        def send(self, item: object) -> None:
            super().send(item)
            if self.sent.qsize() == 2:  # The message that ends the wait for devices.
                if not late:
                    self.receive(pickle.dumps(answer))
                raise TimeoutError("another plugin's timeout")

    channel = InterruptingChannel()
    client = PoolClient.over(channel)
    with pytest.raises(TimeoutError):
        client.acquire(DEMAND, 0.0)
    if late:
        channel.receive(pickle.dumps(answer))
    sent = [channel.sent.get() for _ in range(4)]
    assert sent[2:] == [CancelRequest(1), ReleaseWorld(3, "its driver has stopped waiting for it", frozenset(), False)]
