"""The choice between xdist's scheduler and that of the plugin, in xdist's controller.

The plugin's scheduler (`features/order/scheduler.py`) is imported only if it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.features.order.worker_channels import WorkerChannels
from pytest_accel.hardware.inventory import Machine

if TYPE_CHECKING:
    from pytest_accel.features.order.scheduler import DeviceScheduling
    from pytest_accel.features.order.test_demand import Demand


class AccelScheduling:
    """An xdist scheduler that delegates to another one, chosen after collection.

    It delegates to xdist's own scheduler during collection, and also afterwards if no test needs a world or if the
    workers have collected different tests; otherwise to :class:`DeviceScheduling`. xdist has no hook after the
    collection that could replace the scheduler. Its header shows the name of this class.
    """

    def __init__(
        self, config: pytest.Config, own: Any, channels: WorkerChannels, machine: Callable[[], Machine]
    ) -> None:
        """`own` is xdist's own scheduler."""
        self.config = config
        self._scheduler: Any = own
        self._channels = channels
        self._machine = machine
        self._chosen = False
        self._collections: dict[Any, list[str]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of xdist's protocol for schedulers, ``xdist/scheduler/protocol.py``."""
        return getattr(self._scheduler, name)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Note the tests that a worker has collected. Exit if it has other tests and no other worker can run them."""
        from pytest_accel.features.order.scheduler import DifferentTestsError

        self._collections[node] = list(collection)
        try:
            self._scheduler.add_node_collection(node, collection)
        except DifferentTestsError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.TESTS_FAILED)

    def remove_node(self, node: Any) -> str | None:
        """Call the present scheduler, also for those who got this method before the choice (`xdist_hooks.py`)."""
        crashed: str | None = self._scheduler.remove_node(node)
        return crashed

    def schedule(self) -> None:
        """Choose the scheduler in the first call, and have it send tests."""
        if not self._chosen:
            self._chosen = True
            self._choose()
        self._scheduler.schedule()

    def _choose(self) -> None:
        demand = self._channels.demand
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
        from pytest_accel.features.order.scheduler import DeviceScheduling
        from pytest_accel.features.order.stored_durations import expected_times, recall, record_times

        machine = self._machine()
        slots = machine.slots
        kinds = demand.kinds_of_tests(len(collection))
        times = expected_times(recall(self.config), list(zip(collection, kinds, strict=True)))
        record_times(self.config)
        return DeviceScheduling(
            collection,
            demand.backlog(collection, machine, slots, times),
            demand.devices(machine),
            slots,
            self._channels,
            largest_batch=self.config.getoption("maxschedchunk"),
        )
