"""The one place in a session that grants leases: applies the policy, holds the locks, tells who waits.

Between sessions the rule is the policy's: first come, first served, where a request of a session that has had much of
the devices lately counts as having come later (`usage.py`). A request that waits for a device which another session
has makes its wish known in the lock folder with the time from which it counts, and no session takes a device for a
request that counts from later than somebody else's wish for that device. So a busy session cannot keep a device to
itself by taking it again each time it gives it back, nor by tests that last longer than another's, and two that wait
for several devices each do not wait for each other.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pytest_accel.core.clock import monotonic
from pytest_accel.leases.fair_share import Usage
from pytest_accel.leases.lease_table import Holdings, Lease
from pytest_accel.leases.lock_dir import LockFolderError
from pytest_accel.leases.policy import Grant, Request, check, decide, shortages, wanted

if TYPE_CHECKING:
    from pytest_accel.leases.locks import DeviceLocks, Holder

_EAGER = 0.002
_EAGER_FOR = 1.0
_PATIENT = 0.020
_LOOK = 0.100
_LOOK_AGAIN = 0.025
_LINGER = 1.0
_LOOK_AT_LOCKS = 0.5
"""Seconds between two looks at whether the lock files of what is held are in their places."""


class BrokerError(Exception):
    """The broker's thread has ended with an error; the message has the traceback."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    holder: Holder
    since: float
    on_grant: Callable[[Lease], None]
    on_failure: Callable[[Exception], None] | None


class Broker:
    """Grants leases on `devices` and on `slots` CPU rank slots. Thread-safe; no method waits for a lease.

    Callbacks run in the thread whose call made them due, or in the broker's own, never with its lock held; they may
    call the broker, must be short and must not raise.
    """

    def __init__(
        self,
        devices: Sequence[str],
        slots: int,
        locks: DeviceLocks | None,
        on_wanted: Callable[[int], None],
        clock: Callable[[], float] = time.time,
        on_lost: Callable[[int, str], None] | None = None,
    ) -> None:
        """`devices` are in the session's order. `locks` None: no other session is asked.

        ``on_wanted(lease_id)`` is called once a lease when somebody, here or in another session, waits for something
        that it holds: a holder that keeps it for later use gives it back, one that is at work goes on.
        ``on_lost(lease_id, why)`` is called when the lock of a device of the lease was lost and cannot be had again.
        The holder must stop using the device, since another session may take it, and then release the lease.
        """
        self._slots = slots
        self._holdings = Holdings(devices, slots)
        self._locks = locks
        self._on_wanted = on_wanted
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[int, _Waiting] = {}
        self._foreign: set[str] = set()
        self._ids = itertools.count(1)
        self._last_since = 0.0
        self._clock = clock
        """Seconds since the epoch: what sessions compare."""
        self._usage = Usage(moment=clock())
        self._thread: threading.Thread | None = None
        self._last_change = 0.0
        self._nap = 0.0
        self._closed = False

    def submit(
        self,
        candidates: Sequence[str],
        count: int,
        holder: Holder,
        on_grant: Callable[[Lease], None],
        *,
        slots: int = 0,
        ties: Sequence[tuple[str, str, float]] = (),
        parts: Mapping[str, int] | None = None,
        sets: int = 1,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> int:
        """Ask for `count` of the devices `candidates` and for `slots` slots; the request's id.

        `parts` says how many parts of each candidate are asked for (None: whole devices); see
        :class:`~pytest_accel.leases.policy.Request` for `ties` and `sets`.

        ``on_grant(lease)`` is called when the lease is there: before this returns, if it can be granted now.
        ``on_failure(error)`` is called in its place where the lock folder cannot be used
        (:class:`~pytest_accel.leases.lock_dir.LockFolderError`), or the broker's thread has ended with an error
        (:class:`BrokerError`); without it the error is raised in the thread that meets it. Raises ValueError for a
        request that could never be granted, RuntimeError when the broker is closed.
        """
        chosen = tuple(name for name in self._holdings.devices if name in set(candidates))
        taken = tuple(parts[name] for name in chosen) if parts else ()
        if unknown := set(candidates).difference(chosen):
            raise ValueError(
                f"candidates {sorted(unknown)} are not among the session's devices {list(self._holdings.devices)}"
            )
        request = Request(next(self._ids), chosen, count, slots, tuple(ties), taken, sets)
        check(request, self._slots)
        with self._lock:
            if self._closed:
                raise RuntimeError("the broker is closed: no lease can be asked for any more")
            self._count_usage()
            turn = self._clock() + self._usage.handicap
            self._last_since = max(turn, math.nextafter(self._last_since, math.inf))
            if not self._waiting:
                # Nobody has looked at these since the last request went.
                self._foreign.clear()
            self._waiting[request.id] = _Waiting(request, holder, self._last_since, on_grant, on_failure)
            calls = self._settle()
        self._deliver(calls)
        return request.id

    def cancel(self, request_id: int) -> bool:
        """Withdraw a request; False if it is not waiting (any more), because it was granted, failed or cancelled."""
        with self._lock:
            if self._waiting.pop(request_id, None) is None:
                return False
            calls = self._settle()
        self._deliver(calls)
        return True

    def release(self, lease_id: int) -> None:
        """Give a lease back. Once is enough and twice does no harm: a crash and an orderly end may both do it."""
        with self._lock:
            held = self._holdings.leases.get(lease_id)
            if held is None:
                return
            self._count_usage()
            left = self._holdings.remove(lease_id)
            if self._locks is not None:
                for device in left:
                    if self._locks.holds(device):  # Else its lock has been lost.
                        self._locks.loosen(device)
            with suppress(LockFolderError):
                self._tell(held.lease.devices)
            calls = self._settle()
        self._deliver(calls)

    def pass_on(self, lease_id: int, request_id: int) -> bool:
        """Give a lease of devices as it is to the request that has waited longest, in place of release and grant.

        So a process that is warm on the devices can serve the next one. False, and nothing happens, if another request
        waits longer, here or in another session, or the lease is not what the request is for. `on_grant` is not called.
        """
        with self._lock:
            held = self._holdings.leases.get(lease_id)
            waiting = next(iter(self._waiting.values()), None)
            if held is None or waiting is None or waiting.request.id != request_id:
                return False
            devices, request = held.lease.devices, waiting.request
            if len(devices) != request.count or not set(devices) <= set(request.candidates):
                return False
            if any(request.takes(device) != parts for device, parts in held.lease.takes()):
                return False
            if self._locks is not None:
                rivals = self._locks.wishes.rivals()
                if any(rivals.get(device, math.inf) < waiting.since for device in devices):
                    return False
            del self._waiting[request_id]
            held.told = False
            held.holder = replace(waiting.holder, since=time.time(), processes=held.holder.processes)
            with suppress(LockFolderError):
                self._tell(devices)
            calls = self._settle()
        self._deliver(calls)
        return True

    def describe(
        self, lease_id: int, *, processes: Sequence[tuple[int, float]] | None = None, test: str | None = None
    ) -> None:
        """Tell other sessions what a lease is used for; nothing happens if it has been given back.

        `processes` are those that use its devices (pid and creation time): as long as one of them is alive, whatever
        becomes of this session, nobody else gets the devices.
        """
        with self._lock:
            held = self._holdings.leases.get(lease_id)
            if held is None:
                return
            if processes is not None:
                held.holder = replace(held.holder, processes=tuple(processes))
            if test is not None:
                held.holder = replace(held.holder, test=test)
            self._tell(held.lease.devices)

    def holders(self, request_id: int) -> dict[str, Holder] | None:
        """Return who has each of the candidates of a waiting request that somebody has, here or in another session.

        None if the request is not waiting (any more).
        """
        with self._lock:
            waiting = self._waiting.get(request_id)
            if waiting is None:
                return None
            found: dict[str, Holder] = {}
            for device in waiting.request.candidates:
                if device in self._holdings.held:
                    found[device] = self._holdings.holder(device)
                elif self._locks is not None and (holder := self._locks.holder(device)) is not None:
                    found[device] = holder
            return found

    def users_of_slots(self) -> list[tuple[int, Holder]]:
        """Return how many CPU slots each lease has that has some, and who has the lease."""
        with self._lock:
            return [(held.lease.slots, held.holder) for held in self._holdings.leases.values() if held.lease.slots]

    def ahead_of(self, request_id: int) -> list[Holder]:
        """Return who waits in this session, for longer, for a device or slots that the request waits for too."""
        with self._lock:
            waiting = self._waiting.get(request_id)
            if waiting is None:
                return []
            mine = waiting.request
            earlier = [other for number, other in self._waiting.items() if number < request_id]
            return [
                other.holder
                for other in earlier
                if (mine.slots and other.request.slots) or not set(mine.candidates).isdisjoint(other.request.candidates)
            ]

    def close(self) -> None:
        """Give every lease back and forget every request, without a callback."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._holdings.clear()
            if self._locks is not None:
                self._locks.close()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            # A callback that waits for the caller of close() must not keep it here.
            thread.join(2.0)

    def _count_usage(self) -> None:
        """Before anything changes in what is held."""
        self._usage = self._usage.at(self._clock(), self._holdings.part)

    def _requests(self) -> list[Request]:
        return [waiting.request for waiting in self._waiting.values()]

    def _free(self) -> dict[str, int]:
        return self._holdings.free(without=self._foreign)

    def _tell(self, devices: Iterable[str]) -> None:
        """Say in the lock files who has those of `devices` that are held."""
        if self._locks is not None:
            for device in dict.fromkeys(devices):
                if device in self._holdings.held and self._locks.holds(device):
                    self._locks.update(device, self._holdings.holder(device))

    def _settle(self) -> list[Callable[[], None]]:
        """What follows from a change, with the lock held; returns the calls that are then due without it."""
        calls = self._grant()
        self._last_change = monotonic()
        if self._locks is not None:
            sought = bool(self._sought())
            if (sought or self._holdings.held) and self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(self._locks,), name="accel-broker", daemon=True)
                self._thread.start()
            elif sought and self._nap > _EAGER:
                self._changed.notify()
        return calls

    def _grant(self) -> list[Callable[[], None]]:
        calls: list[Callable[[], None]] = []
        rivals: dict[str, float] | None = None
        settled = False
        while self._waiting and not settled:
            settled = True
            for grant in decide(self._requests(), self._free(), self._holdings.free_slots):
                waiting = self._waiting[grant.request]
                holder = replace(waiting.holder, since=time.time())
                if grant.devices and self._locks is not None:
                    rivals = self._locks.wishes.rivals() if rivals is None else rivals
                    try:
                        refused = self._take(self._locks, grant.devices, holder, rivals, waiting.since)
                    except Exception as error:
                        del self._waiting[grant.request]
                        calls.append(partial(waiting.on_failure or _fail, error))
                        settled = False
                        break
                    if refused is not None:
                        self._foreign.add(refused)
                        settled = False
                        break
                calls.append(self._give(grant, holder))
        if self._locks is not None:
            # Not before: another session would take what an earlier request of this one gets now.
            self._let_go(self._locks)
        return calls

    def _let_go(self, locks: DeviceLocks) -> None:
        """Unlock the devices that nobody has any more, except those that a request of this session waits for.

        If these were unlocked, other sessions could take one of them after the other from a request that needs several
        at once. A device for which another session has waited longer is unlocked: two sessions that keep a device each
        and need both would wait for each other otherwise.
        """
        loose = locks.loose
        if not loose:
            return
        kept: dict[str, Holder] = {}
        rivals = locks.wishes.rivals() if self._waiting else {}
        for shortage in shortages(self._requests(), self._free(), self._holdings.free_slots) if self._waiting else ():
            waiting = self._waiting[shortage.request.id]
            for device in loose.intersection(shortage.request.candidates) if shortage.devices else ():
                if waiting.since <= rivals.get(device, math.inf):
                    kept.setdefault(device, waiting.holder)
        locks.let_go(loose - kept.keys())
        for device, holder in kept.items():
            locks.keep(device, holder)

    def _give(self, grant: Grant, holder: Holder) -> Callable[[], None]:
        waiting = self._waiting.pop(grant.request)
        lease = Lease(next(self._ids), grant.devices, grant.slots, grant.parts)
        self._count_usage()
        self._holdings.add(lease, holder)
        if grant.parts:
            with suppress(LockFolderError):
                self._tell(grant.devices)
        return partial(waiting.on_grant, lease)

    def _deliver(self, calls: Sequence[Callable[[], None]]) -> None:
        # One that raises against the rules must not cost the others their lease.
        with ExitStack() as stack:
            for call in reversed(calls):
                stack.callback(call)
        # One after the other: what the first gives back may be all that was wanted.
        while (lease := self._next_wanted()) is not None:
            self._on_wanted(lease)

    def _next_wanted(self) -> int | None:
        with self._lock:
            if not self._waiting:
                return None
            leases = self._holdings.leases
            slots = {lease: held.lease.slots for lease, held in leases.items()}
            devices = {lease: held.lease.devices for lease, held in leases.items()}
            asked = wanted(self._requests(), self._free(), self._holdings.free_slots, devices, slots)
            lease = next((lease for lease in asked if not leases[lease].told), None)
            if lease is not None:
                leases[lease].told = True
            return lease

    def _sought(self) -> dict[str, float]:
        """The candidates of the requests that another session keeps waiting, and since when they wait."""
        since: dict[str, float] = {}
        if self._foreign and self._waiting:
            for shortage in shortages(self._requests(), self._free(), self._holdings.free_slots):
                if shortage.devices and not self._foreign.isdisjoint(shortage.request.candidates):
                    for device in shortage.request.candidates:
                        since.setdefault(device, self._waiting[shortage.request.id].since)
        return since

    def _run(self, locks: DeviceLocks) -> None:
        """The thread: asks for devices that other sessions have, and listens for the wishes of other sessions."""
        try:
            self._attend(locks)
        except Exception as error:
            self._break(error)

    def _attend(self, locks: DeviceLocks) -> None:
        needed = look = look_at_locks = monotonic()
        while True:
            with self._changed:
                now = monotonic()
                sought = self._sought()
                if sought or self._holdings.held:
                    needed = now
                if self._closed or now - needed > _LINGER:
                    self._thread = None
                    return
                calls: list[Callable[[], None]] = []
                if sought:
                    self._foreign.clear()
                    calls = self._grant()
                    sought = self._sought()
                # A wish that cannot be written costs the place in the queue between sessions, not the device.
                with suppress(Exception):
                    locks.wishes.want(sought)
                if now >= look:
                    lease = self._wanted_elsewhere(locks)
                    look = now + (_LOOK if lease is None else _LOOK_AGAIN)
                    if lease is not None:
                        calls.append(partial(self._on_wanted, lease))
                    self._let_go(locks)  # Another session may have waited longer for what is kept.
                if now >= look_at_locks:
                    look_at_locks = now + _LOOK_AT_LOCKS
                    calls += self._renew_locks(locks)
                if not calls:
                    eager = now - self._last_change < _EAGER_FOR
                    self._nap = (_EAGER if eager else _PATIENT) if sought else look - now
                    self._changed.wait(self._nap)
            try:
                self._deliver(calls)
            except Exception as error:
                self._report(error)

    def _break(self, error: Exception) -> None:
        """Fail every request that waits: nobody would grant it. The next request starts a new thread."""
        text = "".join(traceback.format_exception(error))
        failure = BrokerError(f"the thread that grants devices has ended with an error:\n{text}")
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._thread = None  # Before the callbacks, which may submit a request that needs a new thread.
        try:
            if not waiting:
                self._report(error)
            self._deliver([partial(one.on_failure or _fail, failure) for one in waiting])
        except Exception as another:
            self._report(another)

    def _report(self, error: Exception) -> None:
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))

    def _renew_locks(self, locks: DeviceLocks) -> list[Callable[[], None]]:
        """Make the lock files anew that something has deleted; returns the calls for leases whose locks are lost."""
        calls: list[Callable[[], None]] = []
        for device in locks.missing():
            try:
                locks.renew(device)
            except LockFolderError as error:
                why = f"the lock of {device} was lost, since its lock file was deleted or moved: {error}"
                calls += [
                    partial(self._on_lost or _ignore, held.lease.id, why)
                    for held in self._holdings.leases.values()
                    if device in held.lease.devices
                ]
        return calls

    def _wanted_elsewhere(self, locks: DeviceLocks) -> int | None:
        # One at a time: it may be enough for whoever waits, and what is kept warm on the others stays.
        untold = [held for held in self._holdings.leases.values() if held.lease.devices and not held.told]
        rivals = locks.wishes.rivals() if untold else {}
        first = next((held for held in untold if not rivals.keys().isdisjoint(held.lease.devices)), None)
        if first is None:
            return None
        first.told = True
        return first.lease.id

    def _take(
        self, locks: DeviceLocks, devices: Sequence[str], holder: Holder, rivals: Mapping[str, float], since: float
    ) -> str | None:
        """Lock all of `devices` that are not locked for a part of them, or none; returns the one that cannot be had."""
        with ExitStack() as undo:
            for device in dict.fromkeys(devices):
                if rivals.get(device, math.inf) < since:
                    return device
                if not locks.holds(device):
                    if not locks.try_acquire(device, holder):
                        return device
                    undo.callback(locks.loosen, device)
            undo.pop_all()
        return None


def _fail(error: Exception) -> None:
    raise error


def _ignore(lease_id: int, why: str) -> None:
    pass
