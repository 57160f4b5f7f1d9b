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

from pytest_accel.leases.broker import Broker, BrokerError
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


def test_linked_devices_are_granted_together(session: Session) -> None:
    leases: list[Lease] = []
    submit(session(), DEVICES, 2, leases.append, ties=[("b", "d", 1.0)])
    assert leases[0].devices == ("b", "d")


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


def test_callbacks_may_call_the_broker(session: Session) -> None:
    broker = session()
    done: list[Lease] = []

    def use(lease: Lease) -> None:
        done.append(lease)
        broker.release(lease.id)

    held: list[Lease] = []
    submit(broker, DEVICES, 4, held.append)
    for _ in range(5):
        submit(broker, DEVICES, 3, use)
    assert done == []
    broker.release(held[0].id)
    assert len(done) == 5


def test_a_callback_that_raises_does_not_affect_other_requests(session: Session) -> None:
    broker = session(locks=False)
    leases: list[Lease] = []

    def broken(lease: Lease) -> None:
        raise OSError("gone")

    submit(broker, DEVICES, 4, leases.append)
    submit(broker, DEVICES, 1, broken)
    submit(broker, DEVICES, 1, leases.append)
    with pytest.raises(OSError, match="gone"):
        broker.release(leases[0].id)
    assert leases[1].devices == ("b",)


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


def test_no_more_leases_are_reported_as_wanted_than_a_request_needs(session: Session) -> None:
    asked: list[int] = []

    def give_back(lease: int) -> None:
        asked.append(lease)
        broker.release(lease)

    broker = session(locks=False, on_wanted=give_back)
    leases: list[Lease] = []
    for device in DEVICES:
        submit(broker, (device,), 1, leases.append)
    submit(broker, DEVICES, 2, leases.append)
    assert leases[4].devices == ("a", "b")
    assert asked == [leases[0].id, leases[1].id]


@pytest.mark.parametrize(
    ("candidates", "count", "slots", "match"),
    [
        (("a", "x"), 1, 0, r"candidates \['x'\] are not among"),
        (("a", "b"), 3, 0, "count=3: must be from 0 to the number of candidates, 2"),
        (("a",), -1, 0, "count=-1"),
        ((), 0, 5, "slots=5: must be from 0 to the session's 4"),
        (("a",), 0, 0, "count=0 and slots=0"),
    ],
)
def test_a_request_that_can_never_be_granted_is_an_error(
    session: Session, candidates: tuple[str, ...], count: int, slots: int, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        submit(session(), candidates, count, print, slots=slots)


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


def test_a_device_that_another_session_has_released_is_granted_at_once(session: Session) -> None:
    one, two = session(), session()
    leases: list[Lease] = []
    submit(one, ("a",), 1, leases.append)
    assert two.cancel(submit(two, ("a",), 1, leases.append))
    one.release(leases[0].id)
    submit(two, ("a",), 1, leases.append)
    assert len(leases) == 2


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


def test_a_request_of_another_session_that_has_ended_blocks_nobody(session: Session, wanted_leases: Queue[int]) -> None:
    one, two = session(), session()
    leases: Queue[Lease] = Queue()
    submit(one, ("a",), 1, leases.put)
    first = leases.get()
    request = submit(two, ("a",), 1, leases.put)
    assert wanted_leases.get(timeout=TIMEOUT) == first.id
    submit(one, ("a",), 1, leases.put)
    assert two.cancel(request)
    one.release(first.id)
    assert leases.get(timeout=TIMEOUT).devices == ("a",)


def test_other_sessions_see_the_test_and_processes_of_a_lease(session: Session, tmp_path: Path) -> None:
    broker, others = session(), DeviceLocks(tmp_path / "locks")
    leases: list[Lease] = []
    submit(broker, ("a", "b"), 2, leases.append)
    shown = others.holder("b")
    assert shown is not None
    assert shown.since > ME.since
    broker.describe(leases[0].id, test="tests/test_x.py::test_two")
    broker.describe(leases[0].id, processes=[(1, 2.0)])
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


def test_an_unusable_lock_folder_fails_a_waiting_request(session: Session, tmp_path: Path) -> None:
    one, two = session(), session()
    leases: list[Lease] = []
    errors: Queue[Exception] = Queue()
    submit(one, ("a",), 1, leases.append)
    submit(two, ("a",), 1, leases.append, on_failure=errors.put)
    break_folder(tmp_path / "locks")
    lock_path(tmp_path / "locks", "a").unlink()
    one.release(leases[0].id)
    assert isinstance(errors.get(timeout=TIMEOUT), LockFolderError)
    assert len(leases) == 1


def test_a_device_whose_lock_file_cannot_be_read_has_no_known_holder(session: Session, tmp_path: Path) -> None:
    broker, folder = session(), tmp_path / "locks"
    leases: list[Lease] = []
    submit(broker, ("a",), 1, leases.append)
    waiting = submit(broker, ("a", "b"), 2, leases.append)
    folder.rename(tmp_path / "moved")
    folder.touch()
    obstacles = broker.obstacles(waiting)
    assert obstacles is not None
    assert obstacles.holders.keys() == {"a"}
    folder.unlink()


def test_a_device_whose_lock_file_is_none_is_held_and_others_are_leased(session: Session, tmp_path: Path) -> None:
    """Any user can make a folder with the name of a lock file."""
    broker, path = session(), lock_path(tmp_path / "locks", "a")
    path.mkdir()
    leases: Queue[Lease] = Queue()
    submit(broker, ("a", "b"), 1, leases.put)
    assert leases.get_nowait().devices == ("b",)
    waiting = submit(broker, ("a", "c"), 2, leases.put)
    obstacles = broker.obstacles(waiting)
    assert obstacles is not None
    assert obstacles.lines({}) == [f"a is held by {path}, which is no lock file (a directory)"]
    path.rmdir()
    assert leases.get(timeout=TIMEOUT).devices == ("a", "c")


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


def test_a_failed_thread_fails_waiting_requests_and_is_replaced(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = session(), session()
    held: list[Lease] = []
    leases: Queue[Lease] = Queue()
    errors: Queue[Exception] = Queue()
    submit(one, ("a",), 1, held.append)

    def raise_in_thread(locks: DeviceLocks, device: str) -> None:
        raise KeyError("met in the thread")

    def kept(locks: DeviceLocks) -> list[str]:
        return ["b"] if locks is two._locks else []  # The other broker polls too.

    def ask_again(error: Exception) -> None:
        patch.undo()
        submit(two, ("a",), 1, leases.put, on_failure=errors.put)
        errors.put(error)

    with monkeypatch.context() as patch:
        patch.setattr(DeviceLocks, "unlock", raise_in_thread)
        submit(two, ("a",), 1, leases.put, on_failure=ask_again)
        patch.setattr(DeviceLocks, "locked", property(kept))
        error = errors.get(timeout=TIMEOUT)
    assert isinstance(error, BrokerError)
    assert str(error).startswith("the thread that grants devices has ended with an error:\nTraceback")
    assert "KeyError: 'met in the thread'" in str(error)
    one.release(held[0].id)
    assert leases.get(timeout=TIMEOUT).devices == ("a",)


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_request_fails_if_its_thread_cannot_be_started(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = session(), session()
    held: list[Lease] = []
    leases: Queue[Lease] = Queue()
    errors: list[Exception] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse_to_start)
        submit(one, ("a",), 1, held.append)
        submit(two, ("a",), 1, leases.put, on_failure=errors.append)
    assert [lease.devices for lease in held] == [("a",)]
    assert [type(error) for error in errors] == [BrokerError]
    assert "can't start new thread" in str(errors[0])
    submit(two, ("a",), 1, leases.put, on_failure=errors.append)
    one.release(held[0].id)
    assert leases.get(timeout=TIMEOUT).devices == ("a",)


def test_a_broker_whose_thread_could_not_be_started_can_be_closed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = session()
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    submit(broker, ("a",), 1, lambda lease: None)
    broker.close()


def test_an_invalid_wait_file_is_ignored(session: Session, tmp_path: Path) -> None:
    one, two = session(), session()
    mine: list[Lease] = []
    theirs: Queue[Lease] = Queue()
    submit(one, ("a",), 1, mine.append)
    submit(two, ("a",), 1, theirs.put)
    for number, since in enumerate(("1" + "0" * 400, "-Infinity", "NaN", "1e400")):
        (tmp_path / "locks" / f"pytest-accel-{number}.wish").write_text(f'{{"a": {since}}}')
    one.release(mine[0].id)
    assert theirs.get(timeout=TIMEOUT).devices == ("a",)
    for path in (tmp_path / "locks").glob("*.wish"):
        path.unlink(missing_ok=True)


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
