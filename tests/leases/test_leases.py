"""Tests of the leases of sessions: which requests are granted, alone and beside other sessions, and who has to wait."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.hardware.health import Health
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.demand import Holder, WorldDemand
from pytest_accel.leases.leases import HeldLease, Leases
from pytest_accel.leases.locks import SessionLocks, who_holds
from pytest_accel.leases.shared_folder import VARIABLE, LockFolderError, PlaceError
from tests.deadline import scaled
from tests.leases.demands import devices, session, slots

NOON = time.mktime((2020, 2, 3, 12, 0, 0, 0, 0, -1))
ADA = Holder(71, "ada", "test_big.py::test_one", NOON)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the lock folder of all sessions of the test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


def open_descriptors() -> set[int]:
    """Return the descriptors of this process. Objects of earlier tests may close theirs at any time."""
    return {int(name) for name in os.listdir("/dev/fd")}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a test that runs `test` in an event loop, and checks that no lock file stays open."""

    def run(folder: Path) -> None:
        before = open_descriptors()
        asyncio.run(asyncio.wait_for(test(folder), scaled(60)))
        assert open_descriptors() <= before

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynccontextmanager
async def running(*leases: Leases) -> AsyncIterator[None]:
    """Have these sessions look after each other in the block, and close them at its end."""
    tasks = [asyncio.create_task(one.run()) for one in leases]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        for one in leases:
            one.close()


async def until(lease: HeldLease, *, wanted: bool) -> None:
    """Wait until somebody waits for `lease`, or until nobody does."""
    while lease.wanted != wanted:
        await asyncio.sleep(0.001)


def names(lease: HeldLease) -> list[str]:
    return [device.id for device in lease.devices]


def test_of(folder: Path) -> str | None:
    """Return the tests that have the first device, as its lock file says."""
    shown = who_holds(folder, "sim-0")
    return None if shown is None else shown.test


def at_once(leases: Leases, demand: WorldDemand) -> HeldLease:
    """Return a lease that must be granted without an iteration of the event loop."""
    with pytest.raises(StopIteration) as granted:
        leases.take(demand).send(None)
    lease = granted.value.value
    assert isinstance(lease, HeldLease)
    return lease


async def waiting(leases: Leases, demand: WorldDemand) -> asyncio.Task[HeldLease]:
    """Return a task that waits for `demand`."""
    task = asyncio.create_task(leases.take(demand))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # Holders have been told.
    assert leases.waiting(demand) is not None
    return task


def reasons(leases: Leases, demand: WorldDemand) -> list[str]:
    """Return a line for each reason why `demand` waits."""
    _, lines = leases.waiting(demand) or ("", [])
    return lines


async def cancel(task: asyncio.Task[HeldLease]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# One session


@in_loop
async def test_free_devices_and_slots_are_granted_at_once_and_returned_once(folder: Path) -> None:
    for accel in ("sim:4", "sim:4,shared"):
        one = session(accel)
        lease = at_once(one, devices(3))
        assert names(lease) == ["sim-0", "sim-1", "sim-2"]
        assert len(lease.descriptors) == (3 if accel == "sim:4,shared" else 0)
        task = await waiting(one, devices(2))
        one.give_back(lease)
        assert names(await task) == ["sim-0", "sim-1"]
        one.give_back(lease)
        last = at_once(one, devices(2))
        assert names(last) == ["sim-2", "sim-3"], "a lease that is returned twice frees its devices once"
        one.close()
        one.give_back(last)
        one.describe(last, "late", ())


@in_loop
async def test_slots_are_limited_and_use_no_lock_files(folder: Path) -> None:
    one = session()
    three = at_once(one, slots(3))
    assert (three.granted.slots, three.devices, three.descriptors) == (3, (), ())
    two = await waiting(one, slots(2))
    later = await waiting(one, slots(1))
    one.give_back(three)
    assert ((await two).granted.slots, (await later).granted.slots) == (2, 1)
    assert at_once(one, slots(1)).granted.slots == 1
    assert (await waiting(one, slots(9))).cancel(), "more than there are counts as all"
    assert not folder.exists()
    one.close()


@in_loop
async def test_a_cancelled_request_leaves_nothing(folder: Path) -> None:
    one = session()
    first = at_once(one, devices(3))
    large, small = devices(2), devices(1)
    task, later = await waiting(one, large), await waiting(one, small)
    await cancel(task)
    assert one.waiting(large) is None
    assert names(await later) == ["sim-3"], "the request before it waits no more"
    again = await waiting(one, devices(3))
    one.give_back(first)
    await cancel(again)  # Granted, but not taken.
    assert len(names(at_once(one, devices(3)))) == 3
    one.close()


@in_loop
async def test_a_lease_is_wanted_as_long_as_somebody_waits_for_it(folder: Path) -> None:
    told: list[list[HeldLease]] = []
    one = session(on_wanted=lambda: told.append([lease for lease in every if lease.wanted]))
    every = pair, single, two_slots = at_once(one, devices(2)), at_once(one, devices(1)), at_once(one, slots(2))
    task = await waiting(one, devices(3))
    assert told == [[pair, single]]
    second = await waiting(one, devices(4))
    assert told == [[pair, single]], "each holder is told once"
    await cancel(second)
    assert (pair.wanted, single.wanted, two_slots.wanted) == (True, True, False)
    await cancel(task)
    assert not pair.wanted
    for_slots = await waiting(one, slots(3))
    assert told[1:] == [[two_slots]]
    await cancel(for_slots)
    await cancel(await waiting(one, devices(4)))
    assert told[2:] == [[pair, single]]
    one.close()


@in_loop
async def test_a_lease_is_handed_on_to_the_first_request_if_that_has_the_same_key(folder: Path) -> None:
    one = session()
    world, single, of_slots = at_once(one, devices(2)), at_once(one, devices(2)), at_once(one, slots(4))
    one.describe(world, "test_before", [os.getpid()])
    assert test_of(folder) == "test_before"
    assert one.hand_on(world) is None, "nobody waits"
    await waiting(one, slots(1))
    other = await waiting(one, devices(1))
    equal = devices(2, "test_next")
    task = await waiting(one, equal)
    assert one.hand_on(world) is None, "a request with another key is the first"
    await cancel(other)
    wanted = [world.wanted, one.hand_on(world) is equal, world.wanted]
    assert wanted == [True, True, False], "requests for something else do not matter"
    assert one.hand_on(world) is None
    with pytest.raises(asyncio.CancelledError):
        await task
    one.give_back(world)
    assert one.hand_on(world) is None
    one.give_back(single)
    one.give_back(of_slots)
    one.close()


@in_loop
async def test_a_shared_device_is_locked_until_its_last_lease_is_returned(folder: Path) -> None:
    one, two = session("sim:1,shared"), session("sim:1,shared")
    half, quarter = at_once(one, devices(1, "test_a", share=0.5)), at_once(one, devices(1, "test_b", share=0.25))
    assert half.descriptors == quarter.descriptors
    assert test_of(folder) == "test_a, test_b"
    async with running(one, two):
        task = await waiting(two, devices(1))
        one.give_back(half)
        assert test_of(folder) == "test_b"
        assert not task.done()
        one.give_back(quarter)
        assert names(await task) == ["sim-0"]


@in_loop
async def test_a_device_is_not_granted_while_a_process_of_its_last_test_has_it(folder: Path) -> None:
    """Neither in the same session nor in another one; the test that waits is told by which process."""
    one, two = session(), session()
    async with running(one, two):
        lease = at_once(one, devices(4, "test_before"))
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=lease.descriptors[:1]
        ) as left:
            one.give_back(lease)
            single = at_once(one, devices(1))
            assert names(single) == ["sim-1"]
            other = at_once(two, devices(1))
            assert names(other) == ["sim-2"]
            one.give_back(single)
            two.give_back(other)
            demand = devices(4)
            task = await waiting(one, demand)
            [line] = reasons(one, demand)
            assert line.startswith(f"sim-0 is held by process {left.pid} ({sys.executable} -c input(); user ")
            assert line.endswith(", which test_before has left")
            left.kill()
            lease = await task
            assert len(names(lease)) == 4
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=lease.descriptors[:1]
        ) as left:
            task = await waiting(one, devices(4))
            one.give_back(lease)
            await asyncio.sleep(0)
            assert not task.done(), "the session has no right to the device either"
            left.kill()
            await task


@in_loop
async def test_a_request_fails_if_a_device_breaks_that_it_needs_also_while_it_waits(folder: Path) -> None:
    machine = Machine("sim:2")
    ill = {"sim-0": Health("sick", "it has broken memory"), "sim-1": Health()}
    vars(machine.vendor("sim"))["health"] = lambda devices, session: ill
    one = Leases(machine, 4, print, waits_for_busy=False)
    async with running(one):
        lease = at_once(one, devices(1))
        task = await waiting(one, devices(2))
        one.give_back(lease, killed=True)
        text = "(?s)needs 2 sim devices.*\nsim-0 was set aside: it has broken memory$"
        with pytest.raises(PlaceError, match=text):
            await task
        with pytest.raises(PlaceError, match=text):
            at_once(one, devices(2))
        assert names(at_once(one, devices(1))) == ["sim-1"]


@in_loop
async def test_the_reasons_of_a_wait(folder: Path) -> None:
    one = session()
    pair = at_once(one, devices(2, "test_pair"))
    others = SessionLocks(folder)
    for device in ("sim-2", "sim-3"):
        assert others.lock(device)
        others.describe(device, ADA)
    demand, other = devices(2, "test_waits"), devices(1, "test_other")
    await waiting(one, demand)
    await waiting(one, other)
    now = time.strftime("%H:%M:%S", time.localtime(pair.holder.since))
    me = f"pid {os.getpid()} ({pair.holder.user})"
    assert one.waiting(devices(2)) is None
    held = [
        f"sim-0, sim-1 are held by {me} for test_pair since {now}",
        "sim-2, sim-3 are held by pid 71 (ada) for test_big.py::test_one since 2020-02-03 12:00:00",
    ]
    assert one.waiting(demand) == ("2 sim devices", held)
    lines = reasons(one, other)
    assert lines[:2] == held
    assert lines[2].startswith(f"{me} for test_waits since ")
    assert lines[2].endswith(" has waited longer")
    at_once(one, slots(3))
    for_slots = slots(2, "test_slots")
    await waiting(one, for_slots)
    what, lines = one.waiting(for_slots) or ("", [])
    assert (what, [line.partition(" by ")[0] for line in lines]) == ("2 CPU slots", ["3 of 4 are held"])
    third = session()
    last = devices(1)
    await waiting(third, last)
    others.close()
    lines = reasons(third, last)
    assert any(line.startswith(f"{me} for test_waits since ") and "longer" in line for line in lines), lines
    many = session("sim:40")
    at_once(many, devices(40))
    demand = devices(1)
    await waiting(many, demand)
    [line] = reasons(many, demand)
    assert line.partition(" are held by ")[0].endswith("sim-24, sim-25, s…"), "of many devices only the first are named"
    for leases in (one, third, many):
        leases.close()
    await asyncio.sleep(0)


# Several sessions


@in_loop
async def test_a_device_that_another_session_returns_is_granted(folder: Path) -> None:
    one, two = session(), session()
    async with running(one, two):
        three, single = at_once(one, devices(3)), at_once(one, devices(1))
        several, later = await waiting(two, devices(3)), await waiting(two, devices(1))
        await until(three, wanted=True)
        await until(single, wanted=True)
        one.give_back(three)
        assert names(await several) == ["sim-0", "sim-1", "sim-2"]
        assert not later.done()
        one.give_back(single)
        assert names(await later) == ["sim-3"]


@in_loop
async def test_a_session_that_waits_has_its_turn_before_the_later_tests_of_the_holder(folder: Path) -> None:
    one, two = session("sim:2,shared"), session("sim:2,shared")
    async with running(one, two):
        lease = at_once(one, devices(2))
        theirs = await waiting(two, devices(2))
        await until(lease, wanted=True)
        mine = await waiting(one, devices(2))
        assert one.hand_on(lease) is None, "another session waits for its devices"
        one.give_back(lease)
        lease = await theirs
        assert not mine.done()
        two.give_back(lease)
        await mine
        assert mine.result().wanted is False


@in_loop
async def test_a_lease_is_no_longer_wanted_when_the_other_session_does_not_wait_any_more(folder: Path) -> None:
    told: list[bool] = []
    one, two = session("sim:1,shared", on_wanted=lambda: told.append(lease.wanted)), session("sim:1,shared")
    async with running(one, two):
        lease = at_once(one, devices(1))
        for number in (1, 2):
            task = await waiting(two, devices(1))
            await until(lease, wanted=True)
            await cancel(task)
            await until(lease, wanted=False)
            assert told == [True] * number


@asynccontextmanager
async def busy(leases: Leases, tests: int) -> AsyncIterator[None]:
    """Have a session always run or wait with this number of tests of one device each, in the block."""

    async def run() -> None:
        while True:
            lease = await leases.take(devices(1))
            await asyncio.sleep(0.001)
            leases.give_back(lease)

    tasks = [asyncio.create_task(run()) for _ in range(tests)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@in_loop
async def test_a_session_does_not_starve_beside_one_that_always_waits(folder: Path) -> None:
    one, two = session(), session()
    async with running(one, two), busy(one, 8):
        for _ in range(3):
            two.give_back(await two.take(devices(4)))
    holder, one, two = session("sim:2,shared"), session("sim:2,shared"), session("sim:2,shared")
    async with running(holder, one, two):
        at_once(holder, devices(1))  # The others have the second device in turn, and always lack the first.
        async with busy(one, 3):
            await asyncio.sleep(0.01)  # Until all of them have begun or wait.
            for _ in range(3):
                two.give_back(await two.take(devices(1)))


@in_loop
async def test_an_unusable_lock_folder_fails_the_request(folder: Path) -> None:
    one = session()
    async with running(one):
        one.give_back(at_once(one, devices(1)))
        folder.chmod(0o777)  # Another user could replace a new file in it.
        with pytest.raises(LockFolderError, match=r"locks has mode 0777"):
            await one.take(devices(2))
        assert names(at_once(one, devices(1))) == ["sim-0"], "the request that has failed keeps no lock"
    with pytest.raises(LockFolderError, match=r"locks has mode 0777"):
        at_once(session(), devices(1))
