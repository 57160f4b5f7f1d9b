"""Tests of `LiveState`, the present state of a session, which is updated by its events."""

from __future__ import annotations

import pytest

from pytest_accel.core.record_events import (
    DeviceFound,
    Event,
    PhaseReported,
    RankPlace,
    RequestEnded,
    TestStarted,
    WorldAcquired,
    WorldGone,
    WorldRequested,
    WorldReturned,
    WorldStarting,
)
from pytest_accel.features.record.live_state import LiveState


def state_after(*events: Event) -> LiveState:
    """Return the state after `events`; the first happens at the time 0, each of the others one second later."""
    state = LiveState()
    for at, event in enumerate(events):
        state.apply(event, float(at))
    return state


def phase(test: str, when: str, outcome: str = "passed", worker: str = "") -> PhaseReported:
    return PhaseReported(test, when, outcome, 0.0, 0.0, worker)


def new_world(number: int, request: int, test: str, *devices: str) -> list[Event]:
    """Return the events of a request that gets a new world."""
    ranks = tuple(RankPlace(devices=(device,)) for device in devices)
    return [
        WorldRequested(request, test, "about"),
        WorldStarting(number, request, "about", ranks),
        WorldAcquired(number, request),
    ]


def test_a_request_uses_devices_from_its_leases_and_ends_with_its_world() -> None:
    requested = WorldRequested(1, "test_a", "about")
    starting = WorldStarting(7, 1, "about", (RankPlace(devices=("d0", "d1")),))
    waiting = state_after(DeviceFound("d0", "sim", 0, "d0"), DeviceFound("d1", "sim", 1, "d1"), requested)
    assert [(one.test, one.since) for one in waiting.requests.values()] == [("test_a", 2.0)]
    assert (waiting.devices, waiting.devices_in_use) == (2, 0)
    granted = state_after(requested, starting)
    assert (list(granted.requests), granted.devices_in_use) == ([1], 2)
    assert not state_after(requested, starting, WorldAcquired(7, 1)).requests
    assert not state_after(requested, RequestEnded(1, "cancelled")).requests


def test_a_running_test_has_the_world_of_its_worker() -> None:
    state = state_after(
        *new_world(1, 1, "test_a", "d0"),
        *new_world(2, 2, "test_b", "d1"),
        TestStarted("test_b", "gw1"),
        TestStarted("test_a", "gw0"),
        phase("test_a", "setup", worker="gw0"),
        phase("test_a", "call", worker="gw0"),
        phase("test_a", "teardown", worker="gw0"),
        TestStarted("test_c", "gw0"),
        phase("test_c", "setup", worker="gw0"),
    )
    running = {worker: (one.test, one.world, one.phase) for worker, one in state.running.items()}
    assert running == {"gw0": ("test_c", 1, "call"), "gw1": ("test_b", 2, "setup")}
    assert state.ended == {"test_a": 1}
    assert state.devices_in_use == 2


def test_a_returned_world_is_not_in_use_until_the_next_test_gets_it() -> None:
    first = [*new_world(1, 1, "test_a", "d0"), TestStarted("test_a"), phase("test_a", "teardown"), WorldReturned(1)]
    state = state_after(*first, TestStarted("test_plain"))
    assert (state.devices_in_use, state.running[""].world) == (0, 0)
    state = state_after(*first, WorldRequested(2, "test_b", "about"), WorldAcquired(1, 2, True), TestStarted("test_b"))
    assert (state.devices_in_use, state.running[""].world) == (1, 1)
    assert state_after(*first, WorldGone(1)).devices_in_use == 0


def test_a_test_that_is_retried_runs_in_its_second_world() -> None:
    state = state_after(
        *new_world(1, 1, "test_a", "d0"),
        TestStarted("test_a", "gw0"),
        WorldReturned(1),
        *new_world(2, 2, "test_a", "d1"),
    )
    assert state.running["gw0"].world == 2


def test_a_device_shared_by_ranks_counts_once() -> None:
    assert state_after(*new_world(1, 1, "test_a", "d0", "d0", "d1")).devices_in_use == 2


@pytest.mark.parametrize("worker", ["gw0", ""], ids=["report", "crash"])
def test_a_failed_setup_is_followed_by_the_teardown_and_a_crash_ends_the_test(worker: str) -> None:
    events: list[Event] = [TestStarted("test_a", "gw0"), phase("test_a", "setup", "failed", "gw0")]
    assert state_after(*events).running["gw0"].phase == "teardown"
    state = state_after(*events, phase("test_a", "teardown" if worker else "???", "failed", worker))
    assert (state.running, state.ended) == ({}, {"test_a": 1})


def test_a_copy_does_not_change() -> None:
    state = state_after(*new_world(1, 1, "test_a", "d0"), TestStarted("test_a"))
    copy = state.copy()
    state.apply(phase("test_a", "setup"), 9.0)
    state.apply(WorldReturned(1), 9.0)
    state.apply(WorldRequested(2, "test_b", "about"), 9.0)
    assert (copy.running[""].phase, copy.devices_in_use, dict(copy.requests)) == ("setup", 1, {})
