"""Tests of the channel between a worker and the pool: an error there fails the waiting requests with the reason."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from pytest_accel.core.record_events import Recorders
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.node_lease import NodeLease
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_client import PoolService, WorkerPoolClient
from pytest_accel.pool.worker_messages import AcquireWorld, Answer, ReleaseWorld, WatchExit, WorkerMessage
from pytest_accel.pool.world_request import PoolError, WantedObserver, WorldRequest

KEY = cast(WorldKey, None)
HOLDER = Holder.here("a test")


class Channel:
    """One end of a channel; what is sent there comes back from `sent`."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.receive: Callable[[Any], None] = print

    def send(self, item: object) -> None:
        assert isinstance(item, bytes)
        self.sent.put(pickle.loads(item))

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None:
        self.receive = callback


class BrokenPool:
    """A pool whose every method raises, but for the one that is told so."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, why: str) -> None:
        self.failed.append(why)

    def __getattr__(self, name: str) -> Any:
        raise IndexError(f"met in {name}")


def send(channel: Channel, message: WorkerMessage) -> None:
    channel.receive(pickle.dumps(message))


def test_a_request_that_ends_with_an_error_fails_the_worker_and_all_that_wait() -> None:
    channel, pool = Channel(), BrokenPool()
    channel.setcallback(PoolService(lambda: cast(Pool, pool), channel, print, print, print).receive, endmarker=None)
    send(channel, AcquireWorld(7, KEY, HOLDER))
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


def test_a_grant_that_ends_with_an_error_fails_its_test_before_anything_else() -> None:
    """In a thread of the broker, nobody else would answer the test: also where the lease cannot be given back."""
    pool = object.__new__(Pool)
    vars(pool).update(_manager=BrokenPool(), _requests={}, _record=Recorders())
    answers: list[object] = []
    request = WorldRequest(1, KEY, HOLDER, cast(WantedObserver, None), answers.append)
    with pytest.raises(IndexError, match="met in give_back"):
        pool._granted(request, {0: cast(NodeLease, BrokenPool())})
    assert isinstance(answers[0], PoolError)
    assert "IndexError: met in closing" in str(answers[0])


def test_an_answer_that_cannot_be_handled_fails_the_test_that_waits() -> None:
    channel = Channel()
    client = WorkerPoolClient(channel)
    errors: queue.SimpleQueue[PoolError] = queue.SimpleQueue()

    def acquire() -> None:
        with pytest.raises(PoolError) as caught:
            client.acquire(KEY, HOLDER, None)
        errors.put(caught.value)

    thread = threading.Thread(target=acquire)
    thread.start()
    assert channel.sent.get(timeout=30) == AcquireWorld(1, KEY, HOLDER)
    with pytest.raises(pickle.UnpicklingError):
        channel.receive(b"garbage")
    assert "UnpicklingError" in str(errors.get(timeout=30))
    thread.join()
