"""Tests of requests for places, if the devices of a place do not meet the need."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.node_lease import LeaseId, NodeLease, UnfitNodeError
from pytest_accel.pool.place_request import PlaceRequest
from pytest_accel.pool.placement import Place
from tests.nodes.table_cluster import TableCluster

KEY = WorldKey("sim", DeviceNeed(1, "sim"), 1, grouped=False, devices_per_rank=1)


@dataclass(frozen=True)
class FakeLease:
    """A fake lease of a device."""

    id: LeaseId
    devices: tuple[Device, ...] = ()

    def describe(self, pids: object) -> None:
        pass

    def give_back(self, *, killed: bool = False) -> None:
        pass


@dataclass(eq=False)
class FakeNodeRequest:
    """A fake request for a device of a node, which the test grants or refuses."""

    node: int
    what = "a device"
    unavailable = None
    on_grant: Callable[[NodeLease], None] | None = None
    on_failure: Callable[[Exception], None] | None = None

    def submit(
        self, holder: Holder, on_grant: Callable[[NodeLease], None], on_failure: Callable[[Exception], None]
    ) -> None:
        self.on_grant, self.on_failure = on_grant, on_failure

    def cancel(self) -> bool:
        return True

    def obstacles(self) -> list[str] | None:
        return []

    def take_over(self, lease: NodeLease) -> bool:
        return False

    def grant(self) -> None:
        assert self.on_grant is not None
        self.on_grant(FakeLease(LeaseId(self.node, 1)))

    def refuse(self) -> None:
        assert self.on_failure is not None
        self.on_failure(UnfitNodeError(self.node, f"the devices of node {self.node} are too small"))


@dataclass(eq=False)
class RequestsOnTwoNodes:
    """Requests for worlds of one key, on a cluster with two devices on each of two nodes."""

    table: TableCluster = field(default_factory=lambda: TableCluster({1: ["0", "1"], 2: ["2", "3"]}))
    submitted: queue.SimpleQueue[FakeNodeRequest] = field(default_factory=queue.SimpleQueue)
    answers: queue.SimpleQueue[Place | Exception] = field(default_factory=queue.SimpleQueue)
    unfit: dict[int, str] = field(default_factory=dict)

    def request(self) -> FakeNodeRequest:
        """Request a world; return the request for the device of its place."""
        request = PlaceRequest(
            threading.RLock(),
            self.table,
            KEY,
            Holder.here("a test"),
            self._node_requests,
            lambda leases, place: self.answers.put(place),
            lambda: None,
            self.answers.put,
            self.unfit,
        )
        request.submit()
        return self.next()

    def next(self) -> FakeNodeRequest:
        """Wait until a place is known, and return the request for its device."""
        self.table.settle()
        return self.submitted.get(timeout=60)

    def _node_requests(self, place: Place) -> list[FakeNodeRequest]:
        (node,) = place.nodes
        request = FakeNodeRequest(node)
        self.submitted.put(request)
        return [request]


@pytest.fixture
def session() -> Iterator[RequestsOnTwoNodes]:
    """Yield a session, and close its cluster."""
    made = RequestsOnTwoNodes()
    yield made
    made.table.close()


def test_requests_that_get_the_same_unfit_node_at_once_both_get_another_node(session: RequestsOnTwoNodes) -> None:
    requests = [session.request() for _ in range(2)]
    assert [request.node for request in requests] == [1, 1]
    others = []
    for request in requests:
        request.refuse()
        others.append(session.next())
    for other in others:
        other.grant()
    places = [session.answers.get(timeout=60) for _ in range(2)]
    assert [place.nodes for place in places if isinstance(place, Place)] == [(2,), (2,)]
    assert len(session.table.released) == 2


def test_a_later_request_avoids_an_unfit_node(session: RequestsOnTwoNodes) -> None:
    session.request().refuse()
    session.next().grant()
    assert session.request().node == 2


def test_a_request_fails_with_the_reasons_of_all_nodes_if_all_are_unfit(session: RequestsOnTwoNodes) -> None:
    session.request().refuse()
    session.next().refuse()
    reasons = [f"the devices of node {node} are too small" for node in (1, 2)]
    assert str(session.answers.get(timeout=60)) == "\n".join([*reasons, "there is no other node"])
