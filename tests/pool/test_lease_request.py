"""Tests of leases of devices on other machines, and of requests for devices of several machines."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.launchers.lease_agent import LeaseAgent
from pytest_accel.features.launchers.remote_leases import RemoteLeases
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.demand import MachineDemand, RemoteDevicesError, WorldDemand
from pytest_accel.leases.device_locks import DeviceLocks
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.shared_folder import VARIABLE, default_folder, lock_path
from pytest_accel.pool.lease_request import LeaseRequest, MachineLease
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

SETTINGS = Settings(accel="sim:4,shared")
HOLDER = Holder.here("a test")
_NUMBERS = itertools.count(1)


def demand(count: int) -> MachineDemand:
    """Return a demand for `count` devices, with a number that no other has."""
    need = DeviceNeed(count, "sim")
    return MachineDemand(next(_NUMBERS), WorldDemand(WorldKey("sim", need, count, grouped=True), HOLDER), need)


@dataclass(frozen=True)
class GrantedLease:
    """A granted lease."""

    number: int
    devices: tuple[Device, ...]


class RemoteMachine:
    """A remote machine, and the driver's side of its leases.

    A thread passes the messages of the driver's side to the machine's agent, in order.
    """

    def __init__(self, make_machine: Callable[[Settings], Machine] = machine_for) -> None:
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.leases = RemoteLeases("there", self._messages.put)
        self.agent = LeaseAgent(self._answer, make_machine)
        self._thread = threading.Thread(target=self._run_agent)
        self._thread.start()
        self.granted: queue.SimpleQueue[GrantedLease] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def _answer(self, message: object) -> None:
        self.leases.handle(message)

    def _run_agent(self) -> None:
        while (message := self._messages.get()) is not None:
            self.agent.handle(message)

    def request(self, count: int) -> int:
        """Request `count` devices; return the number of the request."""
        made = demand(count)

        def answer(result: tuple[Device, ...] | Exception) -> None:
            if isinstance(result, Exception):
                self.failed.put(result)
            else:
                self.granted.put(GrantedLease(made.number, result))

        self.leases.submit(made, answer)
        return made.number

    def acquire_all(self) -> GrantedLease:
        """Request all devices, and return their lease."""
        self.request(4)
        return self.granted.get(timeout=30)

    def close(self) -> None:
        self._messages.put(None)
        self._thread.join()
        self.agent.close()


def remote_machine() -> Iterator[RemoteMachine]:
    """Yield a remote machine whose locks are in the folder that the environment names now."""
    made = RemoteMachine()
    assert len(made.leases.inventory("sim", SETTINGS).devices) == 4
    first = made.acquire_all()  # The first lease determines the folder of the locks.
    made.leases.give_back(first.number, killed=False)
    yield made
    made.close()


@pytest.fixture
def remote() -> Iterator[RemoteMachine]:
    """Yield a remote machine."""
    yield from remote_machine()


def device_ids(lease: GrantedLease | MachineLease) -> list[str]:
    return [device.id for device in lease.devices]


def test_a_lease_is_granted_and_given_back(remote: RemoteMachine) -> None:
    wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
    remote.leases.on_wanted = wanted.put
    remote.request(3)
    first = remote.granted.get(timeout=30)
    assert device_ids(first) == ["sim-0", "sim-1", "sim-2"]

    remote.request(2)
    assert wanted.get(timeout=30) == first.number
    assert remote.granted.empty()

    remote.leases.give_back(first.number, killed=False)
    assert device_ids(remote.granted.get(timeout=30)) == ["sim-0", "sim-1"]


def test_a_cancelled_request_holds_no_devices(remote: RemoteMachine) -> None:
    remote.request(4)
    all_four = remote.granted.get(timeout=30)
    remote.leases.cancel(remote.request(4))
    remote.leases.give_back(all_four.number, killed=False)
    # This request may have been granted before it is cancelled.
    remote.leases.cancel(remote.request(4))

    remote.request(4)
    assert len(remote.granted.get(timeout=30).devices) == 4
    assert remote.granted.empty()


def test_requests_to_a_lost_machine_fail(remote: RemoteMachine) -> None:
    remote.request(4)
    remote.granted.get(timeout=30)
    remote.request(4)
    remote.leases.lose()
    assert "the machine there is lost" in str(remote.failed.get(timeout=30))
    remote.request(1)
    assert "the machine there is lost" in str(remote.failed.get(timeout=30))
    with pytest.raises(RemoteDevicesError, match="cannot be looked up: the machine is lost"):
        remote.leases.inventory("cpu", SETTINGS)


def test_the_loss_of_a_lock_on_a_remote_machine_is_reported(remote: RemoteMachine) -> None:
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    remote.leases.on_lost = lambda number, reason: lost.put((number, reason))
    lease = remote.acquire_all()
    folder = default_folder()
    other_locks = DeviceLocks(folder.with_name("elsewhere"))
    assert other_locks.acquire("sim-2", HOLDER)
    lock_path(other_locks.folder, "sim-2").rename(lock_path(folder, "sim-2"))
    number, reason = lost.get(timeout=30)
    assert number == lease.number
    assert "the lock of sim-2 was lost" in reason
    assert reason.endswith("(on there)")
    other_locks.close()


class CombinedRequest:
    """A request for one device of `first`, and then for `count` devices of `second`."""

    def __init__(self, first: RemoteMachine, second: RemoteMachine, count: int) -> None:
        self.leases: queue.SimpleQueue[dict[int, MachineLease]] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        lock = threading.RLock()
        parts = [MachineLease(first.leases, 1, demand(1)), MachineLease(second.leases, 2, demand(count))]
        self.request = LeaseRequest(lock, parts, self.leases.put, self.errors.put)
        with lock:
            self.request.submit()


@pytest.fixture
def second_remote(remote: RemoteMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteMachine]:
    """Yield a second remote machine, with locks of its own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "locks"))
    yield from remote_machine()


def test_one_machine_is_requested_after_the_other(remote: RemoteMachine, second_remote: RemoteMachine) -> None:
    first = remote.acquire_all()
    combined = CombinedRequest(remote, second_remote, 2)
    # While the first machine has no free device, no device of the second is taken.
    second = second_remote.acquire_all()

    second_remote.leases.give_back(second.number, killed=False)
    remote.leases.give_back(first.number, killed=False)

    leases = combined.leases.get(timeout=30)
    assert {machine: device_ids(lease) for machine, lease in leases.items()} == {1: ["sim-0"], 2: ["sim-0", "sim-1"]}
    combined.request.cancel()
    assert remote.granted.empty()
    remote.request(4)
    second_remote.request(4)
    for lease in leases.values():
        lease.give_back()
    assert len(remote.granted.get(timeout=30).devices) == len(second_remote.granted.get(timeout=30).devices) == 4


def test_a_failure_gives_back_the_devices_of_the_other_machine(
    remote: RemoteMachine, second_remote: RemoteMachine
) -> None:
    combined = CombinedRequest(remote, second_remote, 5)

    assert str(combined.errors.get(timeout=30)).endswith("(on there)")
    assert len(remote.acquire_all().devices) == 4
    assert combined.leases.empty()
