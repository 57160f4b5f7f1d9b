"""Tests of leases of devices on other machines, and of requests for devices of several machines."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.features.launchers.remote_leases import LeaseAgent, RemoteLease, RemoteLeases
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lock_dir import VARIABLE, default_folder, lock_path
from pytest_accel.leases.locks import DeviceLocks
from pytest_accel.pool.lease_request import CombinedLeaseRequest
from pytest_accel.pool.node_lease import LeaseNotices, NodeLease, RemoteNodeRequest
from pytest_accel.pool.placement import RemoteDevicesError
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

SETTINGS = Settings(accel="sim:4,shared")
HOLDER = Holder.here("a test")


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
        self.granted: queue.SimpleQueue[RemoteLease] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def _answer(self, message: object) -> None:
        self.leases.handle(message)

    def _run_agent(self) -> None:
        while (message := self._messages.get()) is not None:
            self.agent.handle(message)

    def request(self, count: int) -> int:
        """Request `count` devices; return the number of the request."""
        need = DeviceNeed(count, "sim")
        return self.leases.submit("sim", need, HOLDER, self.granted.put, self.failed.put)

    def acquire_all(self) -> RemoteLease:
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
    made.leases.give_back(made.acquire_all(), killed=False)  # The first lease determines the folder of the locks.
    yield made
    made.close()


@pytest.fixture
def remote() -> Iterator[RemoteMachine]:
    """Yield a remote machine."""
    yield from remote_machine()


def device_ids(lease: RemoteLease | NodeLease) -> list[str]:
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

    remote.leases.give_back(first, killed=False)
    assert device_ids(remote.granted.get(timeout=30)) == ["sim-0", "sim-1"]


def test_a_cancelled_request_holds_no_devices(remote: RemoteMachine) -> None:
    remote.request(4)
    all_four = remote.granted.get(timeout=30)
    remote.leases.cancel(remote.request(4))
    remote.leases.give_back(all_four, killed=False)
    # This request may have been granted before it is cancelled.
    remote.leases.cancel(remote.request(4))

    remote.request(4)
    assert len(remote.granted.get(timeout=30).devices) == 4
    assert remote.granted.empty()


def test_an_impossible_request_fails_with_the_name_of_the_machine(remote: RemoteMachine) -> None:
    remote.request(5)
    assert str(remote.failed.get(timeout=30)).endswith("(on there)")


def test_a_failed_look_up_of_devices_names_the_machine() -> None:
    def fail(settings: object) -> Machine:
        raise ValueError("no such kind")

    remote = RemoteMachine(fail)
    with pytest.raises(RemoteDevicesError, match="the sim devices of there cannot be looked up: no such kind"):
        remote.leases.inventory("sim", SETTINGS)
    remote.close()


def test_requests_to_a_lost_machine_fail(remote: RemoteMachine) -> None:
    remote.request(4)
    remote.granted.get(timeout=30)
    remote.request(4)
    remote.leases.lose()
    assert "the node there is lost" in str(remote.failed.get(timeout=30))
    remote.request(1)
    assert "the node there is lost" in str(remote.failed.get(timeout=30))
    with pytest.raises(RemoteDevicesError, match="cannot be looked up: the node is lost"):
        remote.leases.inventory("cpu", SETTINGS)


def test_an_error_in_a_callback_is_reported_with_its_traceback(remote: RemoteMachine) -> None:
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    remote.leases.on_failure = failures.put

    def broken(lease: RemoteLease) -> None:
        raise IndexError("met in a callback")

    remote.leases.submit("sim", DeviceNeed(1, "sim"), HOLDER, broken, remote.failed.put)
    reason = failures.get(timeout=30)
    assert reason.startswith("the thread that leases devices of there has ended with an error:\nTraceback")
    assert "IndexError: met in a callback" in reason


def test_the_loss_of_a_lock_on_a_remote_machine_is_reported(remote: RemoteMachine) -> None:
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    remote.leases.on_lost = lambda number, reason: lost.put((number, reason))
    lease = remote.acquire_all()
    folder = default_folder()
    other_locks = DeviceLocks(folder.with_name("elsewhere"))
    assert other_locks.try_acquire("sim-2", HOLDER)
    lock_path(other_locks.folder, "sim-2").rename(lock_path(folder, "sim-2"))
    number, reason = lost.get(timeout=30)
    assert number == lease.number
    assert "the lock of sim-2 was lost" in reason
    assert reason.endswith("(on there)")
    other_locks.close()


class CombinedRequest:
    """A request for one device of `first`, and then for `count` devices of `second`."""

    def __init__(self, first: RemoteMachine, second: RemoteMachine, count: int) -> None:
        self.leases: queue.SimpleQueue[dict[int, NodeLease]] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        lock = threading.RLock()
        parts = [
            RemoteNodeRequest(node.leases, LeaseNotices(), number, "sim", DeviceNeed(need, "sim"))
            for node, number, need in ((first, 1, 1), (second, 2, count))
        ]
        self.request = CombinedLeaseRequest(lock, parts, HOLDER, self.leases.put, self.errors.put)
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

    second_remote.leases.give_back(second, killed=False)
    remote.leases.give_back(first, killed=False)

    leases = combined.leases.get(timeout=30)
    assert {node: device_ids(lease) for node, lease in leases.items()} == {1: ["sim-0"], 2: ["sim-0", "sim-1"]}
    combined.request.cancel()
    assert remote.granted.empty()
    remote.request(4)
    second_remote.request(4)
    for lease in leases.values():
        lease.give_back()
    assert len(remote.granted.get(timeout=30).devices) == len(second_remote.granted.get(timeout=30).devices) == 4


def test_the_devices_of_a_cancelled_request_are_given_back(remote: RemoteMachine, second_remote: RemoteMachine) -> None:
    second = second_remote.acquire_all()
    combined = CombinedRequest(remote, second_remote, 1)
    remote.request(4)

    combined.request.cancel()
    second_remote.leases.give_back(second, killed=False)

    assert len(remote.granted.get(timeout=30).devices) == 4
    assert len(second_remote.acquire_all().devices) == 4
    assert combined.leases.empty()
    assert combined.errors.empty()


def raise_error(*args: object) -> int:
    raise RuntimeError("cannot be asked")


def test_an_error_in_a_request_gives_back_the_devices_of_the_other_machine(
    remote: RemoteMachine, second_remote: RemoteMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(second_remote.leases, "submit", raise_error)
        combined = CombinedRequest(remote, second_remote, 1)
        error = combined.errors.get(timeout=30)

    assert str(error) == "cannot be asked"
    assert len(remote.acquire_all().devices) == 4


def test_a_failure_gives_back_the_devices_of_the_other_machine(
    remote: RemoteMachine, second_remote: RemoteMachine
) -> None:
    combined = CombinedRequest(remote, second_remote, 5)

    assert str(combined.errors.get(timeout=30)).endswith("(on there)")
    assert len(remote.acquire_all().devices) == 4
    assert combined.leases.empty()
