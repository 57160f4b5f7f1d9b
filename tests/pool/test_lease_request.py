"""Devices of several machines for one world, and of another machine than the driver's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_accel.core.device import DeviceNeed
from pytest_accel.hardware.inventory import Machine
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.lock_dir import VARIABLE, default_folder, lock_path
from pytest_accel.leases.locks import DeviceLocks
from pytest_accel.nodes.remote_leases import LeaseAgent, RemoteDevicesError, RemoteLease, RemoteLeases
from pytest_accel.pool.lease_request import CombinedLeaseRequest
from pytest_accel.pool.node_lease import LeaseNotices, NodeLease, RemoteNodeRequest
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

SETTINGS = Settings(accel="sim:4,shared")
HOLDER = Holder.here("a test")


class There:
    """Another machine: what the driver's side of it says is handled by its agent in a thread, in order."""

    def __init__(self, make_machine: Callable[[Settings], Machine] = machine_for) -> None:
        self._said: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.leases = RemoteLeases("there", self._said.put)
        self.agent = LeaseAgent(self._answer, make_machine)
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()
        self.granted: queue.SimpleQueue[RemoteLease] = queue.SimpleQueue()
        self.failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def _answer(self, message: object) -> None:
        self.leases.handle(message)

    def _hear(self) -> None:
        while (message := self._said.get()) is not None:
            self.agent.handle(message)

    def ask(self, count: int) -> int:
        need = DeviceNeed(count, "sim")
        return self.leases.submit("sim", need, HOLDER, self.granted.put, self.failed.put)

    def ask_all(self) -> RemoteLease:
        self.ask(4)
        return self.granted.get(timeout=30)

    def close(self) -> None:
        self._said.put(None)
        self._thread.join()
        self.agent.close()


def here() -> Iterator[There]:
    """A machine with the locks that are the environment's now."""
    made = There()
    assert len(made.leases.inventory("sim", SETTINGS).devices) == 4
    made.leases.give_back(made.ask_all(), killed=False)  # Their folder is looked up for the first lease.
    yield made
    made.close()


@pytest.fixture
def there() -> Iterator[There]:
    yield from here()


def ids(lease: RemoteLease | NodeLease) -> list[str]:
    return [device.id for device in lease.devices]


def test_a_lease_is_given_and_given_back(there: There) -> None:
    wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
    there.leases.on_wanted = wanted.put
    there.ask(3)
    first = there.granted.get(timeout=30)
    assert ids(first) == ["sim-0", "sim-1", "sim-2"]

    there.ask(2)
    assert wanted.get(timeout=30) == first.number
    assert there.granted.empty()

    there.leases.give_back(first, killed=False)
    assert ids(there.granted.get(timeout=30)) == ["sim-0", "sim-1"]


def test_a_request_that_is_cancelled_holds_nothing(there: There) -> None:
    there.ask(4)
    all_four = there.granted.get(timeout=30)
    there.leases.cancel(there.ask(4))
    there.leases.give_back(all_four, killed=False)
    # Cancelled when it may have been granted already.
    there.leases.cancel(there.ask(4))

    there.ask(4)
    assert len(there.granted.get(timeout=30).devices) == 4
    assert there.granted.empty()


def test_what_cannot_be_had_is_told_with_the_machines_name(there: There) -> None:
    there.ask(5)
    assert str(there.failed.get(timeout=30)).endswith("(on there)")


def test_devices_that_cannot_be_looked_up_are_told_with_the_machines_name() -> None:
    def fail(settings: object) -> Machine:
        raise ValueError("no such kind")

    there = There(fail)
    with pytest.raises(RemoteDevicesError, match="the sim devices of there cannot be looked up: no such kind"):
        there.leases.inventory("sim", SETTINGS)
    there.close()


def test_nobody_waits_for_a_machine_that_is_lost(there: There) -> None:
    there.ask(4)
    there.granted.get(timeout=30)
    there.ask(4)
    there.leases.lose()
    assert "the node there is lost" in str(there.failed.get(timeout=30))
    there.ask(1)
    assert "the node there is lost" in str(there.failed.get(timeout=30))
    with pytest.raises(RemoteDevicesError, match="cannot be looked up: the node is lost"):
        there.leases.inventory("cpu", SETTINGS)


def test_a_callback_that_raises_is_told_with_its_traceback(there: There) -> None:
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    there.leases.on_failure = failures.put

    def broken(lease: RemoteLease) -> None:
        raise IndexError("met in a callback")

    there.leases.submit("sim", DeviceNeed(1, "sim"), HOLDER, broken, there.failed.put)
    why = failures.get(timeout=30)
    assert why.startswith("the thread that leases devices of there has ended with an error:\nTraceback")
    assert "IndexError: met in a callback" in why


def test_a_lock_that_is_lost_there_is_told_here(there: There) -> None:
    lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    there.leases.on_lost = lambda number, why: lost.put((number, why))
    lease = there.ask_all()
    folder = default_folder()
    elsewhere = DeviceLocks(folder.with_name("elsewhere"))
    assert elsewhere.try_acquire("sim-2", HOLDER)
    lock_path(elsewhere.folder, "sim-2").rename(lock_path(folder, "sim-2"))
    number, why = lost.get(timeout=30)
    assert number == lease.number
    assert "the lock of sim-2 was lost" in why
    assert why.endswith("(on there)")
    elsewhere.close()


class Asked:
    """A request for devices of two nodes, first of `one`."""

    def __init__(self, one: There, two: There, count: int) -> None:
        self.leases: queue.SimpleQueue[dict[int, NodeLease]] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        lock = threading.RLock()
        parts = [
            RemoteNodeRequest(node.leases, LeaseNotices(), number, "sim", DeviceNeed(need, "sim"))
            for node, number, need in ((one, 1, 1), (two, 2, count))
        ]
        self.request = CombinedLeaseRequest(lock, parts, HOLDER, self.leases.put, self.errors.put)
        with lock:
            self.request.submit()


@pytest.fixture
def two(there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[There]:
    """A second machine, with locks of its own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "locks"))
    yield from here()


def test_one_machine_is_asked_after_the_other(there: There, two: There) -> None:
    first = there.ask_all()
    asked = Asked(there, two, 2)
    # As long as the first has none, nothing is taken of the second.
    second = two.ask_all()

    two.leases.give_back(second, killed=False)
    there.leases.give_back(first, killed=False)

    leases = asked.leases.get(timeout=30)
    assert {node: ids(lease) for node, lease in leases.items()} == {1: ["sim-0"], 2: ["sim-0", "sim-1"]}
    asked.request.cancel()
    assert there.granted.empty()
    there.ask(4)
    two.ask(4)
    for lease in leases.values():
        lease.give_back()
    assert len(there.granted.get(timeout=30).devices) == len(two.granted.get(timeout=30).devices) == 4


def test_what_is_no_longer_wanted_is_given_back(there: There, two: There) -> None:
    second = two.ask_all()
    asked = Asked(there, two, 1)
    there.ask(4)

    asked.request.cancel()
    two.leases.give_back(second, killed=False)

    assert len(there.granted.get(timeout=30).devices) == 4
    assert len(two.ask_all().devices) == 4
    assert asked.leases.empty()
    assert asked.errors.empty()


def refuse(*args: object) -> int:
    raise RuntimeError("cannot be asked")


def test_an_error_in_asking_one_machine_gives_back_what_the_other_granted(
    there: There, two: There, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(two.leases, "submit", refuse)
        asked = Asked(there, two, 1)
        error = asked.errors.get(timeout=30)

    assert str(error) == "cannot be asked"
    assert len(there.ask_all().devices) == 4


def test_where_one_machine_fails_the_other_gets_its_own_back(there: There, two: There) -> None:
    asked = Asked(there, two, 5)

    assert str(asked.errors.get(timeout=30)).endswith("(on there)")
    assert len(there.ask_all().devices) == 4
    assert asked.leases.empty()
