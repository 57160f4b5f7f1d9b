"""The choice of the scheduler in xdist's controller. `features/order/scheduler.py` is imported only if it is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.features.order.dispatch import Dispatch
from pytest_accel.hardware.inventory import Machine

if TYPE_CHECKING:
    from pytest_accel.features.order.scheduler import DeviceScheduling
    from pytest_accel.features.order.test_demand import Demand


class AccelScheduling:
    """An xdist scheduler that delegates to another one, chosen after collection.

    It delegates to xdist's own scheduler during collection, and also afterwards if no test needs a world or if the
    workers have collected different tests; otherwise to :class:`DeviceScheduling`. Methods without a docstring are
    those of xdist's protocol for schedulers, ``xdist/scheduler/protocol.py``.
    """

    def __init__(self, config: pytest.Config, own: Any, dispatch: Dispatch, machine: Callable[[], Machine]) -> None:
        """`own` is xdist's own scheduler."""
        self.config = config
        self._scheduler: Any = own
        self._dispatch = dispatch
        self._machine = machine
        self._chosen = False
        self._collections: dict[Any, list[str]] = {}

    @property
    def nodes(self) -> list[Any]:
        return list(self._scheduler.nodes)

    @property
    def collection_is_completed(self) -> bool:
        return bool(self._scheduler.collection_is_completed)

    @property
    def tests_finished(self) -> bool:
        return bool(self._scheduler.tests_finished)

    @property
    def has_pending(self) -> bool:
        return bool(self._scheduler.has_pending)

    def add_node(self, node: Any) -> None:
        self._scheduler.add_node(node)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        from pytest_accel.features.order.scheduler import DifferentTestsError

        self._collections[node] = list(collection)
        try:
            self._scheduler.add_node_collection(node, collection)
        except DifferentTestsError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.TESTS_FAILED)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        self._scheduler.mark_test_complete(node, item_index, duration)

    def mark_test_pending(self, item: str) -> None:
        self._scheduler.mark_test_pending(item)

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        self._scheduler.remove_pending_tests_from_node(node, indices)

    def remove_node(self, node: Any) -> str | None:
        crashed: str | None = self._scheduler.remove_node(node)
        return crashed

    def schedule(self) -> None:
        if not self._chosen:
            self._chosen = True
            self._choose()
        self._scheduler.schedule()

    def _choose(self) -> None:
        demand = self._dispatch.demand
        collections = [self._collections[node] for node in self._scheduler.nodes if node in self._collections]
        collection = collections[0]
        if demand is None or any(other != collection for other in collections):
            return  # xdist's own scheduler reports collections that differ.
        nodes = list(self._scheduler.nodes)
        self._scheduler = self._make_scheduler(demand, collection)
        for node in nodes:
            self._scheduler.add_node(node)
            self._scheduler.add_node_collection(node, self._collections[node])

    def _make_scheduler(self, demand: Demand, collection: list[str]) -> DeviceScheduling:
        from pytest_accel.features.order.history import expected_times, recall, record_times
        from pytest_accel.features.order.scheduler import DeviceScheduling
        from pytest_accel.hardware.vendors.cpu import cpu_slots

        machine, slots = self._machine(), cpu_slots()
        kinds = demand.kinds_of_tests(len(collection))
        times = expected_times(recall(self.config), list(zip(collection, kinds, strict=True)))
        record_times(self.config)
        return DeviceScheduling(
            collection,
            demand.backlog(collection, machine, slots, times),
            demand.devices(machine),
            slots,
            self._dispatch,
            largest_batch=self.config.getoption("maxschedchunk"),
        )
