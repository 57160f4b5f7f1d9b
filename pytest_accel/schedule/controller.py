"""The controller's side: a channel to each worker, and the choice of the scheduler once the tests are known."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pytest_accel.hardware.inventory import Machine
from pytest_accel.schedule.history import Recorder, expected_times, recall
from pytest_accel.schedule.scheduler import DeviceScheduling
from pytest_accel.schedule.test_demand import Demand


class Dispatch:
    """What goes to the workers, and what comes from them, beside xdist's own messages."""

    def __init__(self) -> None:
        self.demand: Demand | None = None
        """What the tests need: all workers tell the same. None: no test needs a world."""
        self._channels: dict[Any, Any] = {}

    def connect(self, node: Any) -> None:
        """Give a worker that is about to be started its channel."""
        channel = self._channels[node] = node.gateway.newchannel()
        node.workerinput["accel_schedule"] = channel
        channel.setcallback(self._receive, endmarker=None)

    def hold(self, node: Any, index: int) -> None:
        """The worker is not to run a test until it is told to."""
        self._send(node, "hold", index)

    def go(self, node: Any, index: int) -> None:
        """The worker is to run it after all."""
        self._send(node, "go", index)

    def _send(self, node: Any, order: str, index: int) -> None:
        with contextlib.suppress(OSError):  # The worker is gone; xdist learns of it by itself.
            self._channels[node].send((order, index))

    def _receive(self, data: bytes | None) -> None:
        if data is not None and self.demand is None:
            self.demand = pickle.loads(data)


class AccelScheduling:
    """xdist's own scheduler until the tests are known, and after that as well if none of them needs a world.

    The methods without a word are those of xdist's schedulers (``xdist/scheduler/protocol.py``).
    """

    def __init__(
        self, config: pytest.Config, own: Any, dispatch: Dispatch, machine: Callable[[], Machine], slots: int
    ) -> None:
        """`own` is the scheduler that xdist has made."""
        self.config = config
        self._now: Any = own
        self._dispatch = dispatch
        self._machine = machine
        self._slots = slots
        self._chosen = False
        self._collections: dict[Any, list[str]] = {}

    @property
    def nodes(self) -> list[Any]:
        return list(self._now.nodes)

    @property
    def collection_is_completed(self) -> bool:
        return bool(self._now.collection_is_completed)

    @property
    def tests_finished(self) -> bool:
        return bool(self._now.tests_finished)

    @property
    def has_pending(self) -> bool:
        return bool(self._now.has_pending)

    def add_node(self, node: Any) -> None:
        self._now.add_node(node)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        self._collections[node] = list(collection)
        self._now.add_node_collection(node, collection)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        self._now.mark_test_complete(node, item_index, duration)

    def mark_test_pending(self, item: str) -> None:
        self._now.mark_test_pending(item)

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        self._now.remove_pending_tests_from_node(node, indices)

    def remove_node(self, node: Any) -> str | None:
        crashed: str | None = self._now.remove_node(node)
        return crashed

    def schedule(self) -> None:
        if not self._chosen:
            self._chosen = True
            self._choose()
        self._now.schedule()

    def _choose(self) -> None:
        demand = self._dispatch.demand
        collections = [self._collections[node] for node in self._now.nodes if node in self._collections]
        collection = collections[0]
        if demand is None or any(other != collection for other in collections):
            return  # What differs between workers is xdist's to tell.
        nodes = list(self._now.nodes)
        self._now = self._scheduler(demand, collection)
        for node in nodes:
            self._now.add_node(node)
            self._now.add_node_collection(node, self._collections[node])

    def _scheduler(self, demand: Demand, collection: list[str]) -> DeviceScheduling:
        machine = self._machine()
        kinds = demand.kinds_of_tests(len(collection))
        times = expected_times(recall(self.config), list(zip(collection, kinds, strict=True)))
        self.config.pluginmanager.register(Recorder(dict(zip(collection, kinds, strict=True))), "accel-durations")
        return DeviceScheduling(
            collection,
            demand.backlog(collection, machine, self._slots, times),
            demand.devices(machine),
            self._slots,
            self._dispatch,
            largest_batch=self.config.getoption("maxschedchunk"),
        )
