"""Tests of requests for places, if the devices of a place do not meet the need."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.demand import MachineDemand, UnfitDevicesError, WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.lease_request import MachineLease
from pytest_accel.pool.place_request import PlaceRequest
from pytest_accel.pool.placement import Place
from tests.features.ray.table_cluster import TableCluster

KEY = WorldKey("sim", DeviceNeed(1, "sim"), 1, grouped=False, devices_per_rank=1)
DEMAND = WorldDemand(KEY, Holder.here("a test"))


@dataclass(eq=False)
class FakeSource:
    """A fake source of one lease, which the test grants or refuses."""

    machine: int
    name = ""
    slots = 0
    answer: Callable[[tuple[Device, ...] | Exception], None] = print

    def submit(self, demand: MachineDemand, answer: Callable[[tuple[Device, ...] | Exception], None]) -> None:
        self.answer = answer

    def cancel(self, number: int) -> bool:
        return True

    def obstacles(self, number: int) -> list[str] | None:
        return []

    def unavailable(self, demand: MachineDemand) -> str | None:
        return None

    def pass_on(self, lease: int, request: int | None) -> bool:
        return False

    def describe(self, number: int, *, pids: Sequence[int] | None = None, test: str | None = None) -> None:
        pass

    def give_back(self, number: int, *, killed: bool) -> None:
        pass

    def grant(self) -> None:
        self.answer(())

    def refuse(self) -> None:
        self.answer(UnfitDevicesError(f"the devices of node {self.machine} are too small"))


@dataclass(eq=False)
class RequestsOnTwoNodes:
    """Requests for worlds of one key, on a cluster with two devices on each of two nodes."""

    table: TableCluster = field(default_factory=lambda: TableCluster({1: ["0", "1"], 2: ["2", "3"]}))
    submitted: queue.SimpleQueue[FakeSource] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[Place | Exception] = field(default_factory=queue.SimpleQueue)
    unfit: dict[int, str] = field(default_factory=dict)

    def request(self) -> FakeSource:
        """Request a world; return the source of the device of its place."""
        request = PlaceRequest(
            threading.RLock(),
            self.table,
            DEMAND,
            self._parts,
            lambda leases, place: self.answers.put(place),
            lambda: None,
            self.answers.put,
            self.unfit,
        )
        request.submit()
        return self.next()

    def next(self) -> FakeSource:
        """Wait until a place is known, and return the source of its device."""
        self.table.settle()
        return self.submitted.get(timeout=60)

    def _parts(self, place: Place) -> list[MachineLease]:
        (machine,) = place.machines
        source = FakeSource(machine)
        self.submitted.put(source)
        return [MachineLease(source, machine, MachineDemand(machine, DEMAND, KEY.need))]


@pytest.fixture
def session() -> Iterator[RequestsOnTwoNodes]:
    """Yield a session, and close its cluster."""
    made = RequestsOnTwoNodes()
    yield made
    made.table.close()


def test_requests_that_get_the_same_unfit_node_at_once_both_get_another_node(session: RequestsOnTwoNodes) -> None:
    requests = [session.request() for _ in range(2)]
    assert [request.machine for request in requests] == [1, 1]
    others = []
    for request in requests:
        request.refuse()
        others.append(session.next())
    for other in others:
        other.grant()
    places = [session.answers.get(timeout=60) for _ in range(2)]
    assert [place.machines for place in places if isinstance(place, Place)] == [(2,), (2,)]
    assert len(session.table.released) == 2


def test_a_later_request_avoids_an_unfit_node(session: RequestsOnTwoNodes) -> None:
    session.request().refuse()
    session.next().grant()
    assert session.request().machine == 2


def test_a_request_fails_with_the_reasons_of_all_nodes_if_all_are_unfit(session: RequestsOnTwoNodes) -> None:
    session.request().refuse()
    session.next().refuse()
    reasons = [f"the devices of node {node} are too small" for node in (1, 2)]
    assert str(session.answers.get(timeout=60)) == "\n".join([*reasons, "there is no other node"])
