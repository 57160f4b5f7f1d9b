"""The broker, the only place in a session that grants leases: applies the policy and takes the locks of devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock, current_thread
from traceback import format_exception

from pytest_accel.core.clock import monotonic, wall_clock
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.device_locks import DeviceLocks
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.policy import Lease, Request, Shortage, check_request, decide, shortages, wanted
from pytest_accel.leases.polling import Callback, PollingThread, PollSchedule
from pytest_accel.leases.request_queue import Obstacles, RequestQueue, WaitingRequest
from pytest_accel.leases.shared_folder import LockFolderError


class BrokerError(Exception):
    """The broker's thread has ended with an error or could not be started; the message contains the traceback."""


class Broker:
    """Grants leases on `devices` and on `slots` CPU rank slots. Thread-safe; no method waits for a lease.

    It connects the policy, the present leases, the queue of requests, the locks and the callbacks. Callbacks run in the
    thread whose call caused them, or in the broker's own thread, and never while the broker's lock is held. They may
    call the broker; they must be short and must not raise.
    """

    def __init__(
        self,
        devices: Sequence[str],
        slots: int,
        locks: DeviceLocks | None,
        on_wanted: Callable[[int], None],
        clock: Callable[[], float] = wall_clock,
        on_lost: Callable[[int, str], None] | None = None,
    ) -> None:
        """`devices` are in the session's order. If `locks` is None, the devices are not shared with other sessions.

        ``on_wanted(lease_id)`` is called when a request in this or another session waits for something that the lease
        holds, once for each holder. A holder that only keeps the lease for later use should release it; one that is
        running a test goes on.
        ``on_lost(lease_id, why)`` is called when the lock of a device of the lease was lost and cannot be acquired
        again. The holder must stop using the device, since another session may take it, and then release the lease.
        ``clock()`` returns seconds since the epoch, so that sessions can compare their times.
        """
        self._slots = slots
        self._table = _LeaseTable(devices, slots)
        self._queue = RequestQueue()
        self._locks = locks
        self._on_wanted = on_wanted
        self._on_lost = on_lost
        self._clock = clock
        self._lock = Lock()
        self._thread = PollingThread(self._lock, self._poll, self._run_callbacks, self._fail_all)
        self._unavailable: set[str] = set()
        """Devices that could not be locked at the last attempt, or for which another session has waited longer."""
        self._last_change = 0.0
        """Time of the last request, cancellation or release (`clock.monotonic`)."""
        self._closed = False

    def submit(self, request: Request, demand: WorldDemand, answer: Callable[[Lease | Exception], None]) -> None:
        """Queue `request`, which is a part of `demand`. The lease has the id of the request.

        `answer` gets the lease when it is granted: before this method returns, if that is possible now. Instead it gets
        an error if the lock folder cannot be used (:class:`~pytest_accel.leases.shared_folder.LockFolderError`) or the
        broker's thread has ended with an error (:class:`BrokerError`). Raises ValueError for a request that could never
        be granted, RuntimeError if the broker is closed.
        """
        if unknown := set(request.candidates).difference(self._table.devices):
            raise ValueError(
                f"candidates {sorted(unknown)} are not among the session's devices {list(self._table.devices)}"
            )
        check_request(request, self._slots)
        with self._lock:
            if self._closed:
                raise RuntimeError("the broker is closed: no lease can be requested any more")
            if not self._queue:
                self._unavailable.clear()  # Outdated: nothing has updated it while no request waited.
            self._queue.add(request, demand, answer, self._clock())
            callbacks = self._react()
        self._run_callbacks(callbacks)

    def cancel(self, request_id: int) -> bool:
        """Cancel a request; return False if it does not wait (it was granted, has failed or was cancelled)."""
        with self._lock:
            if self._queue.pop(request_id) is None:
                return False
            callbacks = self._react()
        self._run_callbacks(callbacks)
        return True

    def release(self, lease_id: int) -> None:
        """Release a lease. Releasing it again has no effect: a crash and a clean shutdown may both release it.

        A device stays locked until its last lease is released, which the caller does after its processes have ended.
        """
        with self._lock:
            lease = self._table.get(lease_id)
            if lease is None:
                return
            self._table.remove(lease_id)
            with suppress(LockFolderError):
                self._write_holders(lease.devices)
            callbacks = self._react()
        self._run_callbacks(callbacks)

    def pass_on(self, lease_id: int, request_id: int | None) -> bool:
        """Transfer a lease of devices to the request that has waited longest, instead of releasing and granting it.

        So a process that is warm on the devices can serve the next request. Return False, without effect, if another
        request in this or another session waits longer, or if the lease does not match the request. The request gets no
        answer: the caller has the lease, under its own id. If `request_id` is None, the caller keeps the lease: return
        False if any request waits; otherwise `on_wanted` is called again for the next one.
        """
        with self._lock:
            lease, waiting = self._table.get(lease_id), self._queue.first
            if lease is not None and request_id is None and waiting is None:
                return self._other_waits().keys().isdisjoint(lease.devices) and self._table.forget_notice(lease_id)
            if lease is None or waiting is None or waiting.request.id != request_id:
                return False
            request = waiting.request
            if len(lease.devices) != request.count or not set(lease.devices) <= set(request.candidates):
                return False
            if any(request.takes(device) != parts for device, parts in lease.takes()):
                return False
            if waiting.is_behind(self._other_waits(), lease.devices):
                return False
            self._queue.pop(request_id)
            self._table.transfer(lease_id, replace(waiting.demand.holder, since=wall_clock()))
            with suppress(LockFolderError):
                self._write_holders(lease.devices)
            callbacks = self._react()
        self._run_callbacks(callbacks)
        return True

    def describe(
        self, lease_id: int, *, processes: Sequence[tuple[int, float]] | None = None, test: str | None = None
    ) -> None:
        """Record in the lock files what a lease is used for; no effect if the lease has been released.

        `processes` are the processes that use its devices (pid and creation time): as long as one of them is alive, no
        other session gets the devices, even if this session has ended.
        """
        with self._lock:
            lease = self._table.get(lease_id)
            if lease is not None:
                self._table.describe(lease_id, processes, test)
                self._write_holders(lease.devices)

    def users(self, lease_id: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the devices of a lease, and the pids of its processes (:meth:`describe`); empty if it is released."""
        with self._lock:
            lease = self._table.get(lease_id)
            return () if lease is None else lease.devices, self._table.processes(lease_id)

    def obstacles(self, request_id: int) -> Obstacles | None:
        """Return what a request waits for, in this and other sessions; None if it does not wait (any more)."""
        with self._lock:
            waiting = self._queue.get(request_id)
            if waiting is None:
                return None
            holders: dict[str, Holder] = {}
            for device in waiting.request.candidates:
                if device in self._table.held:
                    holders[device] = self._table.holder(device)
                elif self._locks is not None:
                    with suppress(LockFolderError):  # The holder is unknown.
                        if (holder := self._locks.holder(device)) is not None:
                            holders[device] = holder
            users = self._table.users_of_slots() if waiting.request.slots else []
            return Obstacles(holders, users, self._slots, self._queue.ahead_of(request_id))

    def close(self) -> None:
        """Release every lease and drop every request, without callbacks."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._table.clear()
            if self._locks is not None:
                self._locks.close()
            thread = self._thread.stop()
        if thread is not None and thread is not current_thread():
            # The timeout prevents a deadlock with a callback that waits for the caller of close().
            thread.join(2.0)

    # With the lock held

    def _free(self) -> dict[str, int]:
        return self._table.free(without=self._unavailable)

    def _lacking(self) -> tuple[Shortage, ...]:
        return shortages(self._queue.requests, self._free(), self._table.free_slots) if self._queue else ()

    def _other_waits(self) -> dict[str, float]:
        return {} if self._locks is None else self._locks.wait_file.others()

    def _awaited_elsewhere(self) -> dict[str, float]:
        """Return the devices of other sessions for which requests wait, each with the arrival time of its request."""
        return self._queue.awaited(self._lacking(), self._unavailable) if self._unavailable else {}

    def _write_holders(self, devices: Iterable[str]) -> None:
        """Write the current holders of `devices` to their lock files, skipping devices that are not held."""
        for device in dict.fromkeys(devices):
            if self._locks is not None and device in self._table.held:
                self._locks.describe(device, self._table.holder(device))

    def _react(self) -> list[Callback]:
        """React to a change in this session; return the callbacks to run after the lock has been released."""
        callbacks = self._grant()
        self._last_change = monotonic()
        awaited = self._awaited_elsewhere()
        if self._locks is not None and (awaited or self._table.held):
            try:
                self._thread.start()
            except RuntimeError as error:
                # Leases that were granted stay valid without the thread; the next change tries to start it again.
                if awaited:
                    callbacks += self._fail_all(error)
            else:
                if awaited:
                    self._thread.hurry()
        return callbacks

    def _grant(self) -> list[Callback]:
        """Grant what can be granted, and unlock what is not needed then; return the callbacks that report the grants.

        A request gets all its devices or none: locks that were taken for a grant that fails are released again.
        """
        callbacks: list[Callback] = []
        other_waits = self._other_waits() if self._queue else {}
        settled = False
        while self._queue and not settled:
            settled = True
            for lease in decide(self._queue.requests, self._free(), self._table.free_slots):
                waiting = self._queue.get(lease.id)
                assert waiting is not None
                holder = replace(waiting.demand.holder, since=wall_clock())
                try:
                    unavailable = self._lock_devices(lease, waiting, holder, other_waits)
                except Exception as error:
                    self._queue.pop(lease.id)
                    callbacks.append(partial(waiting.answer, error))
                    settled = False
                    break
                if unavailable is not None:
                    self._unavailable.add(unavailable)
                    settled = False
                    break
                self._add_lease(lease, holder)
                callbacks.append(partial(waiting.answer, lease))
        # After granting: otherwise another session could take a device that a request of this session gets now.
        self._unlock_unneeded(other_waits)
        return callbacks

    def _lock_devices(
        self, lease: Lease, waiting: WaitingRequest, holder: Holder, other_waits: Mapping[str, float]
    ) -> str | None:
        """Lock all devices of a lease; return the first that this session may not or cannot lock, or None.

        The caller unlocks those that have been locked in vain.
        """
        for device in lease.devices:
            if waiting.is_behind(other_waits, [device]):
                return device
        locks = self._locks
        if locks is None:
            return None
        for device in dict.fromkeys(lease.devices):
            # A device is locked already if other parts of it are leased, unless its lock was lost.
            is_locked = device in self._table.held and device in locks.locked
            if not is_locked and not locks.acquire(device, holder):
                return device
        return None

    def _add_lease(self, lease: Lease, holder: Holder) -> None:
        self._queue.pop(lease.id)
        self._table.add(lease, holder)
        if lease.parts:
            with suppress(LockFolderError):
                self._write_holders(lease.devices)

    def _unlock_unneeded(self, other_waits: Mapping[str, float]) -> None:
        """Unlock the devices without a lease, except those that a request of this session waits for."""
        locks = self._locks
        if locks is None or not (kept := [device for device in locks.locked if device not in self._table.held]):
            return
        reserved = self._queue.reserved(self._lacking(), kept, other_waits)
        for device in kept:
            if device in reserved:
                locks.reserve(device, reserved[device])
            else:
                locks.unlock(device)

    def _poll(self, schedule: PollSchedule, now: float) -> tuple[list[Callback], float] | None:
        """Try to lock devices of other sessions, and check which devices they wait for, in the broker's thread."""
        locks = self._locks
        awaited = self._awaited_elsewhere()
        over = schedule.is_over(now, needed=bool(awaited or self._table.held))
        if self._closed or over or locks is None:
            return None
        callbacks: list[Callback] = []
        if awaited:
            self._unavailable.clear()
            callbacks += self._grant()
            awaited = self._awaited_elsewhere()
        # If the wait file cannot be written, the session has no place in the queue, but may still get the device.
        with suppress(Exception):
            locks.wait_file.publish(awaited)
        if schedule.queue_check_due(now):
            other_waits = self._other_waits()
            # One lease at a time: it may be enough for the waiting session, and warm processes on the others are kept.
            lease_id = self._table.notify(
                lease.id for lease in self._table if not other_waits.keys().isdisjoint(lease.devices)
            )
            if lease_id is not None:
                callbacks.append(partial(self._on_wanted, lease_id))
            schedule.queue_checked(now, hit=lease_id is not None)
            self._unlock_unneeded(other_waits)  # Another session may have waited longer for a device without a lease.
        if schedule.lock_check_due(now):
            callbacks += self._lost_leases(locks.renew_missing())
        return callbacks, schedule.pause(now, self._last_change, waiting=bool(awaited))

    def _lost_leases(self, lost: Mapping[str, str]) -> list[Callback]:
        """Return the ``on_lost`` callbacks of all leases on the devices in `lost`, whose values are the reasons."""
        return [
            partial(self._on_lost, lease.id, why)
            for device, why in lost.items()
            for lease in self._table
            if self._on_lost is not None and device in lease.devices
        ]

    def _fail_all(self, error: Exception) -> list[Callback]:
        """Return callbacks that fail every waiting request, because the thread has ended or could not be started.

        The next request starts a new thread.
        """
        text = "".join(format_exception(error))
        failure = BrokerError(f"the thread that grants devices has ended with an error:\n{text}")
        return [partial(waiting.answer, failure) for waiting in self._queue.clear()]

    # Without the lock

    def _run_callbacks(self, callbacks: Sequence[Callback]) -> None:
        # A callback that raises must not keep the others from running.
        with ExitStack() as stack:
            for callback in reversed(callbacks):
                stack.callback(callback)
        # One at a time: the first holder may release all that the waiting requests need.
        while (lease_id := self._next_wanted()) is not None:
            self._on_wanted(lease_id)

    def _next_wanted(self) -> int | None:
        """Return the next lease whose holder must be notified because a request of this session waits, or None."""
        with self._lock:
            if not self._queue:
                return None
            blocking = wanted(self._queue.requests, self._free(), self._table.free_slots, self._table)
            return self._table.notify(blocking)


@dataclass(slots=True)
class _Held:
    lease: Lease
    holder: Holder
    notified: bool = False
    """True if the holder has been notified that somebody waits for what the lease holds."""


class _LeaseTable:
    """The current leases on a session's `devices` and CPU `slots`. Not thread-safe.

    Only this class changes the state of a lease: :meth:`add` grants it, :meth:`notify` records that its holder knows
    that somebody waits for it, :meth:`forget_notice` that it does not, :meth:`transfer` gives it to another holder, and
    :meth:`remove` ends it.
    """

    def __init__(self, devices: Sequence[str], slots: int) -> None:
        self.devices = tuple(devices)
        self.free_slots = slots
        self._slots = slots
        self._leases: dict[int, _Held] = {}
        self._used: dict[str, int] = {}

    @property
    def held(self) -> Set[str]:
        """The devices that are leased, in whole or in part."""
        return self._used.keys()

    def __iter__(self) -> Iterator[Lease]:
        return (held.lease for held in self._leases.values())

    def get(self, lease_id: int) -> Lease | None:
        """Return the lease, or None if it is unknown or was removed."""
        held = self._leases.get(lease_id)
        return None if held is None else held.lease

    def free(self, without: Collection[str]) -> dict[str, int]:
        """Return the free parts of each device, leaving out the devices in `without`."""
        return {name: WHOLE - self._used.get(name, 0) for name in self.devices if name not in without}

    def add(self, lease: Lease, holder: Holder) -> None:
        """Record a lease that has been granted."""
        self._leases[lease.id] = _Held(lease, holder)
        self.free_slots -= lease.slots
        for device, parts in lease.takes():
            self._used[device] = self._used.get(device, 0) + parts

    def notify(self, lease_ids: Iterable[int]) -> int | None:
        """Mark the first of the leases whose holder has not been notified, and return it; None if all have been."""
        for lease_id in lease_ids:
            if not self._leases[lease_id].notified:
                self._leases[lease_id].notified = True
                return lease_id
        return None

    def forget_notice(self, lease_id: int) -> bool:
        """Have the holder be notified again when somebody waits for the lease; return True."""
        self._leases[lease_id].notified = False
        return True

    def transfer(self, lease_id: int, holder: Holder) -> None:
        """Give the lease, with the processes that use its devices, to another holder."""
        held = self._leases[lease_id]
        held.holder = replace(holder, processes=held.holder.processes)
        held.notified = False

    def describe(self, lease_id: int, processes: Sequence[tuple[int, float]] | None, test: str | None) -> None:
        """Change the processes or the test of a lease's holder; None leaves them as they are."""
        held = self._leases[lease_id]
        held.holder = replace(
            held.holder,
            processes=held.holder.processes if processes is None else tuple(processes),
            test=held.holder.test if test is None else test,
        )

    def remove(self, lease_id: int) -> None:
        """Remove a lease; an unknown one is ignored."""
        held = self._leases.pop(lease_id, None)
        if held is None:
            return
        self.free_slots += held.lease.slots
        for device, parts in held.lease.takes():
            self._used[device] -= parts
        for device in dict.fromkeys(held.lease.devices):
            if not self._used[device]:
                del self._used[device]

    def clear(self) -> None:
        """Remove every lease."""
        self._leases.clear()
        self._used.clear()
        self.free_slots = self._slots

    def holder(self, device: str) -> Holder:
        """Return the holder of a leased device; of several, the earliest, with the tests and processes of all."""
        holders = [held.holder for held in self._leases.values() if device in held.lease.devices]
        return replace(
            min(holders, key=lambda holder: holder.since),
            test=", ".join(dict.fromkeys(holder.test for holder in holders)),
            processes=tuple(process for holder in holders for process in holder.processes),
        )

    def processes(self, lease_id: int) -> tuple[int, ...]:
        """Return the pids of the processes that use a lease's devices; empty if the lease is unknown or was removed."""
        held = self._leases.get(lease_id)
        return () if held is None else tuple(pid for pid, _ in held.holder.processes)

    def users_of_slots(self) -> list[tuple[int, Holder]]:
        """Return the number of CPU slots and the holder of each lease that has any."""
        return [(held.lease.slots, held.holder) for held in self._leases.values() if held.lease.slots]
