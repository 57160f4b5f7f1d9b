"""The broker, the only place in a session that grants leases: applies the policy and takes the locks of devices.

Sessions share devices by the policy's rule: first come, first served, except that a request of a session that has used
the devices much lately counts as having arrived later (`fair_share.py`). A request that waits for a device of another
session is published in the lock folder with its arrival time (`wait_queue.py`), and no session takes a device for a
request that arrived later than a published request for that device. So a busy session cannot keep a device by taking
it again each time it releases it, nor by running longer tests than other sessions, and two sessions that each wait for
several devices cannot deadlock.
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
from pytest_accel.leases.lease_table import Lease, LeaseTable
from pytest_accel.leases.lock_dir import LockFolderError
from pytest_accel.leases.policy import Grant, Request, check, decide, shortages, wanted

if TYPE_CHECKING:
    from pytest_accel.leases.locks import DeviceLocks, Holder

_FAST_POLL = 0.002
"""Seconds between attempts to lock devices of other sessions, during `_FAST_POLL_TIME` seconds after a change."""
_FAST_POLL_TIME = 1.0
_SLOW_POLL = 0.020
"""Seconds between these attempts later on."""
_QUEUE_CHECK_INTERVAL = 0.100
"""Seconds between checks if other sessions wait for devices of this one."""
_QUEUE_CHECK_AFTER_HIT = 0.025
"""Seconds until the next such check after one that has found a lease that another session waits for."""
_IDLE_TIME = 1.0
"""Seconds after which the thread ends if no device is leased and no request waits for another session."""
_LOCK_CHECK_INTERVAL = 0.5
"""Seconds between checks that the lock files of leased devices still exist."""


class BrokerError(Exception):
    """The broker's thread has ended with an error; the message contains the traceback."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    holder: Holder
    since: float
    on_grant: Callable[[Lease], None]
    on_failure: Callable[[Exception], None] | None


class Broker:
    """Grants leases on `devices` and on `slots` CPU rank slots. Thread-safe; no method waits for a lease.

    Callbacks run in the thread whose call caused them, or in the broker's own thread, and never while the broker's lock
    is held. They may call the broker; they must be short and must not raise.
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
        """`devices` are in the session's order. If `locks` is None, the devices are not shared with other sessions.

        ``on_wanted(lease_id)`` is called when a request in this or another session waits for something that the lease
        holds, once for each holder. A holder that only keeps the lease for later use should release it; one that is
        running a test goes on.
        ``on_lost(lease_id, why)`` is called when the lock of a device of the lease was lost and cannot be acquired
        again. The holder must stop using the device, since another session may take it, and then release the lease.
        """
        self._slots = slots
        self._table = LeaseTable(devices, slots)
        self._locks = locks
        self._on_wanted = on_wanted
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[int, _Waiting] = {}
        self._unavailable: set[str] = set()
        """Devices that could not be locked at the last attempt, or for which another session has waited longer."""
        self._ids = itertools.count(1)
        self._last_since = 0.0
        self._clock = clock
        """Returns seconds since the epoch, so that sessions can compare their times."""
        self._usage = Usage(moment=clock())
        self._thread: threading.Thread | None = None
        self._last_change = 0.0
        self._poll_interval = 0.0
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
        """Request `count` of the devices `candidates` and `slots` CPU slots; return the request's id.

        `parts` gives the number of requested parts of each candidate (None: whole devices); see
        :class:`~pytest_accel.leases.policy.Request` for `ties` and `sets`.

        ``on_grant(lease)`` is called when the lease is granted: before this method returns, if that is possible now.
        ``on_failure(error)`` is called instead if the lock folder cannot be used
        (:class:`~pytest_accel.leases.lock_dir.LockFolderError`) or the broker's thread has ended with an error
        (:class:`BrokerError`); without it the error is raised in the thread in which it occurred. Raises ValueError for
        a request that could never be granted, RuntimeError if the broker is closed.
        """
        chosen = tuple(name for name in self._table.devices if name in set(candidates))
        taken = tuple(parts[name] for name in chosen) if parts else ()
        if unknown := set(candidates).difference(chosen):
            raise ValueError(
                f"candidates {sorted(unknown)} are not among the session's devices {list(self._table.devices)}"
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
                # Out of date: these are not checked while no request waits.
                self._unavailable.clear()
            self._waiting[request.id] = _Waiting(request, holder, self._last_since, on_grant, on_failure)
            calls = self._react()
        self._run_callbacks(calls)
        return request.id

    def cancel(self, request_id: int) -> bool:
        """Cancel a request; return False if it does not wait (it was granted, has failed or was cancelled)."""
        with self._lock:
            if self._waiting.pop(request_id, None) is None:
                return False
            calls = self._react()
        self._run_callbacks(calls)
        return True

    def release(self, lease_id: int) -> None:
        """Release a lease. Releasing it again has no effect: a crash and a clean shutdown may both release it."""
        with self._lock:
            held = self._table.leases.get(lease_id)
            if held is None:
                return
            self._count_usage()
            freed = self._table.remove(lease_id)
            if self._locks is not None:
                for device in freed:
                    if self._locks.holds(device):  # Otherwise its lock was lost.
                        self._locks.retain(device)
            with suppress(LockFolderError):
                self._write_holders(held.lease.devices)
            calls = self._react()
        self._run_callbacks(calls)

    def pass_on(self, lease_id: int, request_id: int) -> bool:
        """Transfer a lease of devices to the request that has waited longest, instead of releasing and granting it.

        So a process that is warm on the devices can serve the next request. Return False, without effect, if another
        request in this or another session waits longer, or if the lease does not match the request. `on_grant` is not
        called.
        """
        with self._lock:
            held = self._table.leases.get(lease_id)
            waiting = next(iter(self._waiting.values()), None)
            if held is None or waiting is None or waiting.request.id != request_id:
                return False
            devices, request = held.lease.devices, waiting.request
            if len(devices) != request.count or not set(devices) <= set(request.candidates):
                return False
            if any(request.takes(device) != parts for device, parts in held.lease.takes()):
                return False
            if self._locks is not None:
                other_waits = self._locks.wait_queue.others()
                if any(other_waits.get(device, math.inf) < waiting.since for device in devices):
                    return False
            del self._waiting[request_id]
            held.notified = False
            held.holder = replace(waiting.holder, since=time.time(), processes=held.holder.processes)
            with suppress(LockFolderError):
                self._write_holders(devices)
            calls = self._react()
        self._run_callbacks(calls)
        return True

    def describe(
        self, lease_id: int, *, processes: Sequence[tuple[int, float]] | None = None, test: str | None = None
    ) -> None:
        """Record in the lock files what a lease is used for; no effect if the lease has been released.

        `processes` are the processes that use its devices (pid and creation time): as long as one of them is alive, no
        other session gets the devices, even if this session has ended.
        """
        with self._lock:
            held = self._table.leases.get(lease_id)
            if held is None:
                return
            if processes is not None:
                held.holder = replace(held.holder, processes=tuple(processes))
            if test is not None:
                held.holder = replace(held.holder, test=test)
            self._write_holders(held.lease.devices)

    def holders(self, request_id: int) -> dict[str, Holder] | None:
        """Return the holders, in this or another session, of those candidates of a waiting request that are held.

        Return None if the request does not wait (any more).
        """
        with self._lock:
            waiting = self._waiting.get(request_id)
            if waiting is None:
                return None
            found: dict[str, Holder] = {}
            for device in waiting.request.candidates:
                if device in self._table.held:
                    found[device] = self._table.holder(device)
                elif self._locks is not None and (holder := self._locks.holder(device)) is not None:
                    found[device] = holder
            return found

    def users_of_slots(self) -> list[tuple[int, Holder]]:
        """Return the number of CPU slots and the holder of each lease that has any."""
        with self._lock:
            return [(held.lease.slots, held.holder) for held in self._table.leases.values() if held.lease.slots]

    def ahead_of(self, request_id: int) -> list[Holder]:
        """Return the holders of earlier requests of this session that wait for the same devices or slots."""
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
        """Release every lease and drop every request, without callbacks."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._table.clear()
            if self._locks is not None:
                self._locks.close()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            # The timeout prevents a deadlock with a callback that waits for the caller of close().
            thread.join(2.0)

    def _count_usage(self) -> None:
        """Add the use of devices up to now. Call this before the set of leases changes."""
        self._usage = self._usage.at(self._clock(), self._table.used_fraction)

    def _requests(self) -> list[Request]:
        return [waiting.request for waiting in self._waiting.values()]

    def _free(self) -> dict[str, int]:
        return self._table.free(without=self._unavailable)

    def _write_holders(self, devices: Iterable[str]) -> None:
        """Write the current holders of `devices` to their lock files, skipping devices that are not held."""
        if self._locks is not None:
            for device in dict.fromkeys(devices):
                if device in self._table.held and self._locks.holds(device):
                    self._locks.update(device, self._table.holder(device))

    def _react(self) -> list[Callable[[], None]]:
        """React to a change, with the lock held; return the callbacks to run after the lock has been released."""
        calls = self._grant()
        self._last_change = monotonic()
        if self._locks is not None:
            foreign_waits = bool(self._foreign_waits())
            if (foreign_waits or self._table.held) and self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(self._locks,), name="accel-broker", daemon=True)
                self._thread.start()
            elif foreign_waits and self._poll_interval > _FAST_POLL:
                self._changed.notify()
        return calls

    def _grant(self) -> list[Callable[[], None]]:
        calls: list[Callable[[], None]] = []
        other_waits: dict[str, float] | None = None
        settled = False
        while self._waiting and not settled:
            settled = True
            for grant in decide(self._requests(), self._free(), self._table.free_slots):
                waiting = self._waiting[grant.request]
                holder = replace(waiting.holder, since=time.time())
                if grant.devices and self._locks is not None:
                    other_waits = self._locks.wait_queue.others() if other_waits is None else other_waits
                    try:
                        refused = self._lock_all(self._locks, grant.devices, holder, other_waits, waiting.since)
                    except Exception as error:
                        del self._waiting[grant.request]
                        calls.append(partial(waiting.on_failure or _raise, error))
                        settled = False
                        break
                    if refused is not None:
                        self._unavailable.add(refused)
                        settled = False
                        break
                calls.append(self._add_lease(grant, holder))
        if self._locks is not None:
            # After granting: otherwise another session could take a device that a request of this session gets now.
            self._unlock_unneeded(self._locks)
        return calls

    def _unlock_unneeded(self, locks: DeviceLocks) -> None:
        """Unlock released devices, except those that a request of this session waits for.

        If these were unlocked too, other sessions could take them one by one, and a request that needs several at once
        would starve. A device for which another session has waited longer is unlocked in any case: otherwise two
        sessions that both need two devices and keep one each would deadlock.
        """
        retained = locks.retained
        if not retained:
            return
        kept: dict[str, Holder] = {}
        other_waits = locks.wait_queue.others() if self._waiting else {}
        for shortage in shortages(self._requests(), self._free(), self._table.free_slots) if self._waiting else ():
            waiting = self._waiting[shortage.request.id]
            for device in retained.intersection(shortage.request.candidates) if shortage.devices else ():
                if waiting.since <= other_waits.get(device, math.inf):
                    kept.setdefault(device, waiting.holder)
        locks.unlock(retained - kept.keys())
        for device, holder in kept.items():
            locks.reserve(device, holder)

    def _add_lease(self, grant: Grant, holder: Holder) -> Callable[[], None]:
        waiting = self._waiting.pop(grant.request)
        lease = Lease(next(self._ids), grant.devices, grant.slots, grant.parts)
        self._count_usage()
        self._table.add(lease, holder)
        if grant.parts:
            with suppress(LockFolderError):
                self._write_holders(grant.devices)
        return partial(waiting.on_grant, lease)

    def _run_callbacks(self, calls: Sequence[Callable[[], None]]) -> None:
        # A callback that raises must not keep the others from running.
        with ExitStack() as stack:
            for call in reversed(calls):
                stack.callback(call)
        # One at a time: the first holder may release all that the waiting requests need.
        while (lease := self._next_wanted()) is not None:
            self._on_wanted(lease)

    def _next_wanted(self) -> int | None:
        with self._lock:
            if not self._waiting:
                return None
            leases = self._table.leases
            slots = {lease: held.lease.slots for lease, held in leases.items()}
            devices = {lease: held.lease.devices for lease, held in leases.items()}
            blocking = wanted(self._requests(), self._free(), self._table.free_slots, devices, slots)
            lease = next((lease for lease in blocking if not leases[lease].notified), None)
            if lease is not None:
                leases[lease].notified = True
            return lease

    def _foreign_waits(self) -> dict[str, float]:
        """Return the candidates of requests that wait for unavailable devices, each with its request's arrival time."""
        since: dict[str, float] = {}
        if self._unavailable and self._waiting:
            for shortage in shortages(self._requests(), self._free(), self._table.free_slots):
                if shortage.devices and not self._unavailable.isdisjoint(shortage.request.candidates):
                    for device in shortage.request.candidates:
                        since.setdefault(device, self._waiting[shortage.request.id].since)
        return since

    def _run(self, locks: DeviceLocks) -> None:
        """Run in the thread: try to lock devices of other sessions, and check which devices other sessions wait for."""
        try:
            self._poll(locks)
        except Exception as error:
            self._fail_all(error)

    def _poll(self, locks: DeviceLocks) -> None:
        last_needed = next_check = next_lock_check = monotonic()
        while True:
            with self._changed:
                now = monotonic()
                foreign_waits = self._foreign_waits()
                if foreign_waits or self._table.held:
                    last_needed = now
                if self._closed or now - last_needed > _IDLE_TIME:
                    self._thread = None
                    return
                calls: list[Callable[[], None]] = []
                if foreign_waits:
                    self._unavailable.clear()
                    calls = self._grant()
                    foreign_waits = self._foreign_waits()
                # If the wait file cannot be written, this session loses its place in the queue, but may get the device.
                with suppress(Exception):
                    locks.wait_queue.publish(foreign_waits)
                if now >= next_check:
                    lease = self._wanted_elsewhere(locks)
                    next_check = now + (_QUEUE_CHECK_INTERVAL if lease is None else _QUEUE_CHECK_AFTER_HIT)
                    if lease is not None:
                        calls.append(partial(self._on_wanted, lease))
                    self._unlock_unneeded(locks)  # Another session may have waited longer for a retained device.
                if now >= next_lock_check:
                    next_lock_check = now + _LOCK_CHECK_INTERVAL
                    calls += self._renew_locks(locks)
                if not calls:
                    recent = now - self._last_change < _FAST_POLL_TIME
                    self._poll_interval = (_FAST_POLL if recent else _SLOW_POLL) if foreign_waits else next_check - now
                    self._changed.wait(self._poll_interval)
            try:
                self._run_callbacks(calls)
            except Exception as error:
                self._report(error)

    def _fail_all(self, error: Exception) -> None:
        """Fail every waiting request, which the ended thread cannot grant. The next request starts a new thread."""
        text = "".join(traceback.format_exception(error))
        failure = BrokerError(f"the thread that grants devices has ended with an error:\n{text}")
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._thread = None  # Before the callbacks, which may submit a request that needs a new thread.
        try:
            if not waiting:
                self._report(error)
            self._run_callbacks([partial(one.on_failure or _raise, failure) for one in waiting])
        except Exception as another:
            self._report(another)

    def _report(self, error: Exception) -> None:
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))

    def _renew_locks(self, locks: DeviceLocks) -> list[Callable[[], None]]:
        """Recreate lock files that were deleted; return the ``on_lost`` callbacks of leases whose locks are lost."""
        calls: list[Callable[[], None]] = []
        for device in locks.missing():
            try:
                locks.renew(device)
            except LockFolderError as error:
                why = f"the lock of {device} was lost, since its lock file was deleted or moved: {error}"
                calls += [
                    partial(self._on_lost or _ignore, held.lease.id, why)
                    for held in self._table.leases.values()
                    if device in held.lease.devices
                ]
        return calls

    def _wanted_elsewhere(self, locks: DeviceLocks) -> int | None:
        # One lease at a time: it may be enough for the waiting session, and warm processes on the others are kept.
        candidates = [held for held in self._table.leases.values() if held.lease.devices and not held.notified]
        other_waits = locks.wait_queue.others() if candidates else {}
        first = next((held for held in candidates if not other_waits.keys().isdisjoint(held.lease.devices)), None)
        if first is None:
            return None
        first.notified = True
        return first.lease.id

    def _lock_all(
        self, locks: DeviceLocks, devices: Sequence[str], holder: Holder, other_waits: Mapping[str, float], since: float
    ) -> str | None:
        """Lock all of `devices` or none; return the first that cannot be locked, or None.

        A device that this session holds already, because other parts of it are leased, needs no lock.
        """
        with ExitStack() as undo:
            for device in dict.fromkeys(devices):
                if other_waits.get(device, math.inf) < since:
                    return device
                if not locks.holds(device):
                    if not locks.try_acquire(device, holder):
                        return device
                    undo.callback(locks.retain, device)
            undo.pop_all()
        return None


def _raise(error: Exception) -> None:
    raise error


def _ignore(lease_id: int, why: str) -> None:
    pass
