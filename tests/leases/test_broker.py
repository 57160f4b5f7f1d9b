"""Tests of the broker: which requests it grants, alone and beside the brokers of other sessions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue

import psutil
import pytest

from pytest_accel.leases.broker import Broker
from pytest_accel.leases.device_locks import DeviceLocks
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.policy import Lease
from pytest_accel.leases.shared_folder import LockFolderError, lock_path
from tests.leases.requests import ME, submit

DEVICES = ("a", "b", "c", "d")
TIMEOUT = 30.0
"""Seconds after which a test stops waiting for a result. No result takes this long unless something is broken."""

Session = Callable[..., Broker]


@pytest.fixture
def wanted_leases() -> Queue[int]:
    return Queue()


@pytest.fixture
def session(tmp_path: Path, wanted_leases: Queue[int]) -> Iterator[Session]:
    """Yield a function that makes brokers with a common lock folder; close all of them at the end."""
    brokers: list[Broker] = []
    before = set(threading.enumerate())

    def make(
        *,
        locks: bool = True,
        slots: int = 4,
        on_wanted: Callable[[int], None] = wanted_leases.put,
        clock: Callable[[], float] = time.time,
        on_lost: Callable[[int, str], None] | None = None,
    ) -> Broker:
        its_locks = DeviceLocks(tmp_path / "locks") if locks else None
        brokers.append(Broker(DEVICES, slots, its_locks, on_wanted, clock, on_lost))
        return brokers[-1]

    yield make
    for broker in brokers:
        broker.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT)  # A broker does not join a thread that has failed and was replaced.
    assert set(threading.enumerate()) <= before
    assert not list((tmp_path / "locks").glob("*.wish"))


def test_a_lease_is_kept_if_nobody_waits_any_more_and_is_wanted_again_later(
    session: Session, wanted_leases: Queue[int]
) -> None:
    broker = session()
    leases: list[Lease] = []
    held = submit(broker, DEVICES, 4, leases.append)
    waiting = submit(broker, DEVICES, 1, leases.append)
    assert wanted_leases.get(timeout=TIMEOUT) == held
    assert not broker.pass_on(held, None)
    broker.cancel(waiting)
    assert broker.pass_on(held, None)
    broker.cancel(submit(broker, DEVICES, 1, leases.append))
    assert wanted_leases.get(timeout=TIMEOUT) == held
    assert broker.pass_on(held, None)
    submit(session(), DEVICES, 1, leases.append)  # A request of another session counts, too.
    assert wanted_leases.get(timeout=TIMEOUT) == held
    assert not broker.pass_on(held, None)


def test_a_request_for_free_devices_is_granted_before_submit_returns(session: Session) -> None:
    broker = session()
    leases: list[Lease] = []
    submit(broker, ("a", "b", "c"), 2, leases.append, slots=3)
    assert [(lease.devices, lease.slots) for lease in leases] == [(("a", "b"), 3)]


@pytest.mark.parametrize("locks", [False, True])
def test_a_released_device_is_granted_to_the_waiting_request(session: Session, locks: bool) -> None:
    broker = session(locks=locks)
    leases: list[Lease] = []
    for _ in range(3):
        submit(broker, DEVICES, 2, leases.append)
    assert [lease.devices for lease in leases] == [("a", "b"), ("c", "d")]
    broker.release(leases[1].id)
    assert leases[2].devices == ("c", "d")
    broker.release(leases[1].id)
    submit(broker, DEVICES, 1, leases.append)
    assert len(leases) == 3, "a lease that is released twice frees its devices once"


def test_slots_are_limited_and_use_no_lock_files(session: Session, tmp_path: Path) -> None:
    threads = threading.active_count()
    broker = session(slots=4)
    leases: list[Lease] = []
    submit(broker, (), 0, leases.append, slots=3)
    submit(broker, (), 0, leases.append, slots=2)
    submit(broker, (), 0, leases.append, slots=1)
    assert [lease.slots for lease in leases] == [3]
    broker.release(leases[0].id)
    assert [lease.slots for lease in leases] == [3, 2, 1]
    assert list((tmp_path / "locks").iterdir()) == []
    assert threading.active_count() <= threads  # A thread of an earlier test may have ended.


def test_a_cancelled_request_no_longer_blocks_others(session: Session) -> None:
    broker = session(locks=False)
    leases: list[Lease] = []
    first = submit(broker, DEVICES, 3, leases.append)
    large = submit(broker, DEVICES, 2, leases.append)
    submit(broker, DEVICES, 1, leases.append)
    assert [lease.devices for lease in leases] == [("a", "b", "c")]
    assert broker.cancel(large)
    assert [lease.devices for lease in leases] == [("a", "b", "c"), ("d",)]
    assert not broker.cancel(large)
    assert not broker.cancel(first)


def test_a_lease_that_others_wait_for_is_reported_once(session: Session, wanted_leases: Queue[int]) -> None:
    broker = session(locks=False)
    leases: list[Lease] = []
    submit(broker, ("a",), 1, leases.append)
    submit(broker, ("b",), 1, leases.append)
    submit(broker, ("c",), 1, leases.append)
    assert wanted_leases.empty()
    submit(broker, ("a", "b"), 1, leases.append)
    assert [wanted_leases.get(), wanted_leases.get()] == [leases[0].id, leases[1].id]
    submit(broker, ("a", "b"), 2, leases.append)
    assert wanted_leases.empty()
    broker.release(leases[0].id)
    assert wanted_leases.get() == leases[3].id
    assert wanted_leases.empty()


def test_closing_a_broker_releases_all_locks(session: Session) -> None:
    one, two = session(), session()
    leases: list[Lease] = []
    submit(one, DEVICES, 4, leases.append)
    waiting = submit(one, DEVICES, 1, leases.append)
    one.close()
    submit(two, DEVICES, 4, leases.append)
    assert len(leases) == 2
    one.release(leases[0].id)
    one.describe(leases[0].id, test="late")
    assert not one.cancel(waiting)
    with pytest.raises(RuntimeError, match="closed"):
        submit(one, DEVICES, 1, leases.append)


def test_a_device_that_another_session_releases_is_granted(session: Session) -> None:
    one, two = session(), session()
    mine: list[Lease] = []
    several: Queue[Lease] = Queue()
    single: Queue[Lease] = Queue()
    submit(one, ("a", "b", "c"), 3, mine.append)
    submit(two, ("a", "b", "d"), 3, several.put)
    submit(two, ("c",), 1, single.put)
    assert several.empty()
    assert single.empty()
    one.release(mine[0].id)
    assert several.get(timeout=TIMEOUT).devices == ("a", "b", "d")
    assert single.get(timeout=TIMEOUT).devices == ("c",)


def test_the_holder_is_notified_if_another_session_waits(session: Session, wanted_leases: Queue[int]) -> None:
    leases: Queue[Lease] = Queue()
    other_wanted_leases: Queue[int] = Queue()
    one, two = session(), session(on_wanted=other_wanted_leases.put)
    submit(one, ("a",), 1, leases.put)
    submit(one, ("b",), 1, leases.put)
    kept, wanted = leases.get(), leases.get()
    submit(two, ("b",), 1, leases.put)
    assert wanted_leases.get(timeout=TIMEOUT) == wanted.id
    one.release(wanted.id)
    assert leases.get(timeout=TIMEOUT).devices == ("b",)
    assert other_wanted_leases.empty()
    submit(two, ("a",), 1, leases.put)
    assert wanted_leases.get(timeout=TIMEOUT) == kept.id


def test_between_sessions_the_oldest_request_is_granted_first(session: Session, wanted_leases: Queue[int]) -> None:
    one, two = session(), session()
    order: Queue[str] = Queue()
    grants: Queue[Lease] = Queue()
    mine: list[Lease] = []
    submit(one, ("a", "b"), 2, mine.append)

    def got(who: str) -> Callable[[Lease], None]:
        def note(lease: Lease) -> None:
            order.put(who)
            grants.put(lease)

        return note

    submit(two, ("a", "b"), 2, got("other session"))
    # This notice shows that the request of the other session has been published.
    assert wanted_leases.get(timeout=TIMEOUT) == mine[0].id
    submit(one, ("a",), 1, got("same session, later"))
    one.release(mine[0].id)
    assert order.get(timeout=TIMEOUT) == "other session"
    two.release(grants.get().id)
    assert order.get(timeout=TIMEOUT) == "same session, later"


def test_other_sessions_see_the_test_and_processes_of_a_lease(session: Session, tmp_path: Path) -> None:
    broker, others = session(), DeviceLocks(tmp_path / "locks")
    leases: list[Lease] = []
    submit(broker, ("a", "b"), 2, leases.append)
    broker.describe(leases[0].id, test="tests/test_x.py::test_two", processes=[(1, 2.0)])
    shown = others.holder("b")
    assert shown is not None
    assert (shown.test, shown.processes) == ("tests/test_x.py::test_two", ((1, 2.0),))


def break_folder(folder: Path) -> None:
    """Make `folder` one in which no new lock file may be created, since another user could replace it."""
    folder.chmod(0o777)


def test_an_unusable_lock_folder_fails_the_request(session: Session, tmp_path: Path) -> None:
    broker = session()
    leases: list[Lease] = []
    errors: list[Exception] = []
    submit(broker, ("a",), 1, leases.append)
    broker.release(leases.pop().id)
    break_folder(tmp_path / "locks")
    with pytest.raises(LockFolderError, match=r"locks has mode 0777"):
        submit(broker, ("a", "b"), 2, leases.append)
    submit(broker, ("a", "b"), 2, leases.append, on_failure=errors.append)
    assert [type(error) for error in errors] == [LockFolderError]
    submit(broker, ("a",), 1, leases.append)
    assert [lease.devices for lease in leases] == [("a",)], "the failed request has unlocked the other device"


def sessions_in_order(session: Session) -> tuple[Broker, Broker]:
    """Return two brokers. All requests of the first count as older than those of the second."""
    start = time.time()
    return session(clock=lambda: start), session(clock=lambda: start + 1)


def test_a_released_device_is_kept_for_a_waiting_request_of_the_same_session(session: Session, tmp_path: Path) -> None:
    one, two = sessions_in_order(session)
    mine: list[Lease] = []
    theirs: Queue[Lease] = Queue()
    submit(one, ("a",), 1, mine.append)
    submit(one, ("b",), 1, mine.append)
    waiting = submit(one, ("a", "b"), 2, mine.append, holder=Holder.here("the next one"))
    one.release(mine[0].id)
    submit(two, ("a",), 1, theirs.put)
    assert theirs.empty()
    shown = DeviceLocks(tmp_path / "locks").holder("a")
    assert shown is not None
    assert shown.test == "the next one"
    one.release(mine[1].id)
    assert mine[2].devices == ("a", "b")
    assert theirs.empty()
    one.release(mine[2].id)
    assert theirs.get(timeout=TIMEOUT).devices == ("a",)
    assert not one.cancel(waiting)


def test_a_kept_device_is_released_when_the_waiting_request_is_cancelled(session: Session) -> None:
    one, two = sessions_in_order(session)
    mine: list[Lease] = []
    theirs: Queue[Lease] = Queue()
    submit(one, ("a",), 1, mine.append)
    submit(one, ("b",), 1, mine.append)
    waiting = submit(one, ("a", "b"), 2, mine.append)
    one.release(mine[0].id)
    submit(two, ("a",), 1, theirs.put)
    assert theirs.empty()
    one.cancel(waiting)
    assert theirs.get(timeout=TIMEOUT).devices == ("a",)


def test_two_sessions_that_need_each_others_devices_do_not_deadlock(session: Session) -> None:
    brokers = [session(), session()]
    got: Queue[tuple[Broker, Lease]] = Queue()
    held: list[Lease] = []
    for broker, own in zip(brokers, "ab", strict=True):
        # Each session leases two devices, and then requests all of them.
        submit(broker, (own,), 1, held.append)
        submit(broker, (chr(ord(own) + 2),), 1, held.append)
    for broker in brokers:
        submit(broker, DEVICES, 4, partial(note_grant, got, broker))
    for broker, lease in zip((brokers[0], brokers[0], brokers[1], brokers[1]), held, strict=True):
        broker.release(lease.id)
    for _ in brokers:
        broker, lease = got.get(timeout=TIMEOUT)
        assert lease.devices == DEVICES
        broker.release(lease.id)


def note_grant(got: Queue[tuple[Broker, Lease]], broker: Broker, lease: Lease) -> None:
    got.put((broker, lease))


def test_a_device_whose_last_process_lives_is_kept_for_the_waiting_request(session: Session, child: int) -> None:
    one, two = sessions_in_order(session)
    mine: Queue[Lease] = Queue()
    theirs: Queue[Lease] = Queue()
    submit(one, ("a",), 1, mine.put)
    first = mine.get()
    one.describe(first.id, processes=[(child, psutil.Process(child).create_time())])
    submit(one, ("a",), 1, mine.put)
    one.release(first.id)
    submit(two, ("a",), 1, theirs.put)
    assert mine.empty()
    os.kill(child, signal.SIGKILL)
    assert mine.get(timeout=TIMEOUT).devices == ("a",)
    assert theirs.empty()


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_a_lease_whose_lock_is_lost_is_reported(session: Session, tmp_path: Path) -> None:
    lost: Queue[tuple[int, str]] = Queue()
    one = session(on_lost=lambda lease, why: lost.put((lease, why)))
    leases: list[Lease] = []
    submit(one, ("a", "b"), 2, leases.append)
    submit(one, ("c",), 1, leases.append)
    elsewhere, folder = DeviceLocks(tmp_path / "elsewhere"), tmp_path / "locks"
    assert elsewhere.acquire("b", ME)
    # The file is replaced in one step: otherwise the broker could check the path while no file is there.
    lock_path(tmp_path / "elsewhere", "b").rename(lock_path(folder, "b"))
    lease, why = lost.get(timeout=TIMEOUT)
    assert lease == leases[0].id
    assert "the lock of b was lost, since its lock file was deleted or moved" in why
    assert f"held by pid {os.getpid()}" in why
    assert lost.empty()
    one.release(lease)
    two = DeviceLocks(folder)
    assert two.acquire("a", ME)
    assert not two.acquire("b", ME)
    assert not two.acquire("c", ME)
    two.close()
    elsewhere.close()
