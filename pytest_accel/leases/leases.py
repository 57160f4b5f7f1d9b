"""The leases of a session: the devices and CPU slots of this machine, granted one request after the other.

One queue holds the requests of all kinds: those of different kinds have no candidates in common.
"""

from __future__ import annotations

import math
import os
from asyncio import CancelledError, Future, get_running_loop
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from time import localtime, strftime

from pytest_accel.core.clock import monotonic, wall_clock
from pytest_accel.core.device import Device, DeviceNeed, is_private
from pytest_accel.core.kinds import PJRT_DEVICE
from pytest_accel.core.units import count_text
from pytest_accel.hardware.availability import Guard
from pytest_accel.hardware.device_order import ties
from pytest_accel.hardware.health import HealthVendor
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.hardware.matching import candidates, in_words, shortfall
from pytest_accel.hardware.shares import WHOLE, parts
from pytest_accel.leases import policy
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.locks import SessionLocks, surrounding_test, who_is_next, who_keeps
from pytest_accel.leases.shared_folder import LockFolderError, default_folder

_FAST_POLL = 0.002
"""Seconds between two attempts to lock what other sessions have, if this one has its place in the queue and has changed
lately. Sessions without a place try as often as each other, so that none of them has an advantage."""
_FAST_TIME = 1.0
"""Seconds after a change in this session: the others may react to it soon."""
_POLL = 0.02
"""Seconds between two attempts otherwise. Sessions send each other no notices."""
_LOOK = 0.1
"""Seconds between two looks whether other sessions wait for devices of this one. It is the length of a session's turn:
tests that are shorter run one after the other on the same warm processes, whoever waits."""
_LOCK_CHECK = 0.5
"""Seconds between two checks that the lock files of this session are in their places."""
_MOST_WISHES = 64
"""Number of devices for which a request wishes at most, unless it needs more: each wish is an open file."""
_MOST_NAMES = 16
"""Number of devices that a line about a wait names: more than most machines have, but not all parts of a memory."""


class UnfitDevicesError(Exception):
    """The devices that a cluster has reserved on a machine do not meet the need."""

    def __init__(self, text: str, machine: int = 0) -> None:
        super().__init__(text)
        self.machine = machine


@dataclass(eq=False, slots=True)
class HeldLease:
    """The devices or CPU slots of one request, until :meth:`Leases.give_back`. It may be passed on meanwhile."""

    granted: policy.Lease
    devices: tuple[Device, ...]
    """Devices in the order of the policy; none for CPU slots."""
    demand: WorldDemand
    """The demand of the present holder."""
    holder: Holder
    """The present holder, as other sessions see it."""
    locks: SessionLocks | None
    """The locks of the devices; None if they are not shared with other sessions."""
    wanted: bool = False
    """True while another request, of this or another session, waits for what the lease holds."""

    @property
    def slots(self) -> int:
        """Number of CPU slots."""
        return self.granted.slots

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the locks of the devices, for the processes that use these."""
        locks = self.locks
        return () if locks is None else tuple(locks.descriptor(one) for one in self.ids if one in locks)

    @property
    def ids(self) -> tuple[str, ...]:
        """The id of each device, once."""
        return tuple(dict.fromkeys(self.granted.devices))


@dataclass(eq=False, slots=True)
class _Wait:
    """A request that waits."""

    request: policy.Request
    demand: WorldDemand
    is_over: Future[None]
    outcome: HeldLease | LockFolderError | None = None
    """The lease or the error that has ended the wait; None for a cancellation."""
    unclaimed: Callable[[], None] | None = None
    """Called if the request is cancelled at the moment at which a lease is passed on to it."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """The devices of one kind, from their first use in the session."""

    inventory: Inventory
    locks: SessionLocks | None
    guard: Guard | None
    surrounding: dict[str, str] = field(default_factory=dict)
    """The devices of a test inside which this session runs, each with the reason why it is set aside."""

    @property
    def set_aside(self) -> dict[str, str]:
        """The devices that the session does not use any more, each with the reason."""
        return {**self.surrounding, **(self.guard.aside if self.guard is not None else {})}

    def refuses(self, device: str) -> str | None:
        """Return why a device may not be leased now, or None."""
        return None if self.guard is None else self.guard.refuses(device)


class Leases:
    """The devices and CPU slots of this machine, for one session. All calls are made in the thread of one event loop.

    The policy decides which requests are granted; a device counts as free for it unless another session has it or
    another process of this one (`_elsewhere`). A device that is to be granted is locked first. A request gets
    all its devices or none, but a device that the policy keeps for a request stays locked meanwhile, until another
    session wishes for it.
    """

    def __init__(
        self,
        machine: Machine,
        slots: int,
        on_wanted: Callable[[HeldLease], None],
        on_lost: Callable[[HeldLease, str], None],
        *,
        waits_for_busy: bool,
    ) -> None:
        """`slots` is the number of CPU slots. `waits_for_busy` is True for ``accel_busy = wait``.

        ``on_wanted(lease)`` is called when `HeldLease.wanted` becomes True, at the earliest before `take` has returned
        the lease: a holder that only keeps it for later use should give it back; a running test goes on.
        ``on_lost(lease, why)`` is called when the lock of a device was lost and cannot be had again: another session
        may use the device. Both may call any method.
        """
        self._machine = machine
        self._slots = self._free_slots = slots
        self._on_wanted = on_wanted
        self._on_lost = on_lost
        self._waits_for_busy = waits_for_busy
        self._kinds: dict[str, _Kind] = {}
        self._locks: dict[Path, SessionLocks] = {}
        self._devices: dict[str, tuple[Device, _Kind]] = {}
        self._free: dict[str, int] = {}
        """The free parts of each device, whoever has its lock."""
        self._numbers = count(1)
        self._leases: dict[int, HeldLease] = {}
        self._waiting: dict[int, _Wait] = {}
        """The waiting requests, in the order of their arrival."""
        self._elsewhere: set[str] = set()
        """Devices without a lease that could not be locked at the last attempt. :meth:`run` tries again."""
        self._wished: set[str] = set()
        """Devices of this session for which another one waited at the last look."""
        self._is_reacting = self._has_changed = self._is_closed = False
        self._alarm: Future[None] | None = None
        self._last_change = 0.0
        """Time of the last request or return in this session (`clock.monotonic`)."""
        self._interval = math.inf
        """Seconds between two rounds of :meth:`run`."""

    # For the pool

    async def take(self, demand: WorldDemand, need: DeviceNeed | None = None, mask: str | None = None) -> HeldLease:
        """Wait for a lease for `demand`, and return it; at once if that is possible. A cancellation undoes all of it.

        Raises :class:`~pytest_accel.leases.shared_folder.LockFolderError` if devices cannot be locked, and ValueError
        for a demand that can never be met.

        `need` are the devices on this machine, in place of all that the demand has. `mask` shows only the devices that
        may be leased, as a process without a mask numbers them; :class:`UnfitDevicesError` is raised if they do not
        suffice.
        """
        if self._is_closed:
            raise RuntimeError("the session's leases are closed: none can be requested any more")
        request = self._request(demand, need or _need(demand), mask)
        policy.check_request(request, self._slots)
        self._last_change = monotonic()
        wait = self._waiting[request.id] = _Wait(request, demand, get_running_loop().create_future())
        try:
            self._react()
            await wait.is_over
        except CancelledError:
            if isinstance(wait.outcome, HeldLease):  # And then cancelled before this coroutine has run again.
                (wait.unclaimed or partial(self.give_back, wait.outcome))()
            raise
        finally:
            if self._waiting.pop(request.id, None) is not None:
                self._react()
        if isinstance(wait.outcome, LockFolderError):
            raise wait.outcome
        assert wait.outcome is not None
        return wait.outcome

    def pass_on(self, lease: HeldLease, unclaimed: Callable[[], None]) -> bool:
        """Give a lease, with the processes on its devices, to the request that waits longest for one of the devices.

        Return False, without effect, if that request has another key, or if another session waits for a device. The
        request's :meth:`take` returns this very object; if it is cancelled at this moment, ``unclaimed()`` is called
        in place of that, and the lease is the caller's again.
        """
        if lease.granted.id not in self._leases or not self._wished.isdisjoint(lease.granted.devices):
            return False
        ids = {*lease.ids}
        rivals = (one for one in self._open_requests() if not ids.isdisjoint(one.request.candidates))
        wait = next(rivals, None)
        # Even with an equal key: a device may have been set aside.
        if wait is None or wait.demand.key != lease.demand.key or not ids.issubset(wait.request.candidates):
            return False
        lease.demand, wait.unclaimed = wait.demand, unclaimed
        lease.holder = replace(wait.demand.holder, since=wall_clock(), pids=lease.holder.pids)
        self._tell(lease.ids)
        self._end_wait(wait, lease)
        self._react()
        return True

    def give_back(self, lease: HeldLease, *, killed: bool = False) -> None:
        """Return a lease, after its processes have ended as far as is known; no effect if it was returned before.

        If they were `killed`, its devices are not leased again before they have released the devices' memory.
        """
        if self._leases.pop(lease.granted.id, None) is None:
            return
        self._last_change = monotonic()
        self._free_slots += lease.slots
        for device, taken in lease.granted.takes():
            self._free[device] += taken
        for device in lease.ids:
            kind = self._devices[device][1]
            if killed and kind.guard is not None:
                kind.guard.suspect([device], lease.holder.pids)
            if self._free[device] == WHOLE and lease.locks is not None and device in lease.locks:
                # Even if it is needed again at once: a process that was left keeps the lock.
                lease.locks.unlock(device)
        self._tell(lease.ids)
        self._react()

    def describe(self, lease: HeldLease, *, test: str | None = None, pids: Sequence[int] | None = None) -> None:
        """Tell people and other sessions which test and which processes use the devices of a lease.

        No effect if it was returned.
        """
        if lease.granted.id not in self._leases:
            return
        lease.holder = replace(
            lease.holder,
            test=lease.holder.test if test is None else test,
            pids=lease.holder.pids if pids is None else tuple(pids),
        )
        self._tell(lease.ids)

    def what(self, demand: WorldDemand) -> str:
        """Return what is demanded, in words: ``2 cuda devices with >= 40 GiB``, ``3 CPU slots``."""
        need = _need(demand)
        if need is None:
            return count_text(min(demand.key.ranks, self._slots), "CPU slot")
        return in_words(need, demand.key.kind)

    def waiting(self, demand: WorldDemand) -> list[str] | None:
        """Return a line for each reason why the request for this very `demand` waits; None if it does not wait."""
        wait = next((one for one in self._open_requests() if one.demand is demand), None)
        if wait is None:
            return None
        by_holder: dict[Holder, list[str]] = {}
        next_ones: dict[Holder, None] = {}
        refused: list[str] = []
        for device in wait.request.candidates:
            kind = self._devices[device][1]
            holder = None
            if self._free[device] < WHOLE:
                holder = self._holder(device)
            elif kind.locks is not None and device not in kind.locks:
                with suppress(LockFolderError):  # The holder is unknown.
                    holder = who_keeps(kind.locks.folder, device)
                    if after := None if kind.locks.wishes(device) else who_is_next(kind.locks.folder, device):
                        next_ones.setdefault(after)
            if holder is not None:
                by_holder.setdefault(holder, []).append(device)
            elif (why := kind.refuses(device)) is not None:
                refused.append(f"{device} {why}")
        users = [one for one in self._leases.values() if one.slots and wait.request.slots]
        return [
            *(f"{one.slots} of {self._slots} {_held(one.slots)} by {_in_words(one.holder)}" for one in users),
            *(f"{_names(names)} {_held(len(names))} by {_in_words(holder)}" for holder, names in by_holder.items()),
            *refused,
            *(f"{_in_words(one)} has waited longer" for one in (*next_ones, *self._ahead_of(wait))),
        ]

    def unavailable(self, demand: WorldDemand) -> str | None:
        """Return why `demand` cannot be met any more because devices were set aside in this session, or None."""
        need = _need(demand)
        kind = None if need is None else self._kind(demand.key.kind)
        missing = shortfall(need, _usable(kind)) if need is not None and kind is not None and kind.set_aside else None
        if kind is None or missing is None:
            return None
        return "\n".join([missing, *(f"{name} was set aside: {why}" for name, why in kind.set_aside.items())])

    async def run(self) -> None:
        """Look after what other sessions do, as long as this session lives: they send no notices."""
        next_look = next_check = 0.0
        while True:
            await self._sleep()
            now = monotonic()
            for device in [*self._elsewhere]:
                with suppress(LockFolderError):  # The next attempt to grant the device reports it.
                    if not self._lock(device):
                        continue
                self._elsewhere.discard(device)
            if now >= next_look:
                next_look = now + _LOOK
                self._wished = {one for one in self._leased() if self._is_wished(one)}
            for device in self._kept():
                if self._is_wished(device):
                    self._unlock(device)
                    self._elsewhere.add(device)
            if now >= next_check:
                next_check = now + _LOCK_CHECK
                self._check_locks()
            self._react()

    def close(self) -> None:
        """Drop all leases and requests, without calls of `on_wanted`."""
        self._is_closed = True
        for wait in self._waiting.values():
            wait.is_over.cancel()
        self._leases.clear()
        for locks in self._locks.values():
            locks.close()

    # Requests and devices

    def _request(self, demand: WorldDemand, need: DeviceNeed | None, mask: str | None) -> policy.Request:
        """Return a new request for `demand`."""
        number = next(self._numbers)
        if need is None:
            return policy.Request(number, (), 0, slots=min(demand.key.ranks, self._slots))
        inventory = _usable(self._kind(demand.key.kind))
        fitting = candidates(need, inventory if mask is None else self._shown(mask, need, inventory))
        return policy.Request(
            number,
            tuple(device.id for device in fitting),
            need.count,
            ties=tuple(ties(fitting, need.near)) if need.count > 1 and need.share is None else (),
            parts=tuple(parts(need.share, device) or WHOLE for device in fitting) if need.share else (),
            sets=need.sets,
        )

    def _shown(self, mask: str, need: DeviceNeed, inventory: Inventory) -> Inventory:
        """Return `inventory` with only the devices that `mask` shows."""
        vendor = self._machine.vendor(inventory.kind)
        variable = next((name for name in vendor.mask_variables if name != PJRT_DEVICE), None)
        if variable is None:
            raise UnfitDevicesError(f"{inventory.kind} devices have no mask, by which a cluster could name them")
        # The other variables may set the order in which the mask counts devices (CUDA_DEVICE_ORDER).
        environ = {name: value for name, value in os.environ.items() if name not in vendor.mask_variables}
        names = {device.id for device in vendor.visible(vendor.discover(), {**environ, variable: mask})}
        shown = replace(inventory, devices=tuple(device for device in inventory.devices if device.id in names))
        missing = shortfall(need, shown)
        if missing is not None:
            raise UnfitDevicesError(f"the cluster has reserved {variable}={mask}, but the test {missing}")
        return shown

    def _kind(self, name: str) -> _Kind:
        if name not in self._kinds:
            inventory, vendor = self._machine.of(name), self._machine.vendor(name)
            guard = None
            if isinstance(vendor, HealthVendor):
                guard = Guard(vendor, inventory.devices, self._machine.main_pid, waits=self._waits_for_busy)
            if is_private(vendor):
                kind = _Kind(inventory, None, guard)
            else:
                folder, surrounding = self._find_surrounding(inventory)
                if folder not in self._locks:
                    self._locks[folder] = SessionLocks(folder)
                kind = _Kind(inventory, self._locks[folder], guard, surrounding)
            self._kinds[name] = kind
            for device in inventory.devices:
                self._devices[device.id] = device, kind
                self._free[device.id] = WHOLE
        return self._kinds[name]

    def _find_surrounding(self, inventory: Inventory) -> tuple[Path, dict[str, str]]:
        """Return the folder for the locks, and the devices that a test holds inside which this session runs.

        If the test holds all that `HELD` names, this session leases them, with locks that only sessions inside the test
        use. Otherwise it has none of them, because the test may wait for it, and it must not wait for the test.
        """
        folder, held = default_folder(), self._machine.held
        is_meant = held is not None and (held.kind, held.lock_folder) == (inventory.kind, str(folder))
        claimed = held.devices if held is not None and is_meant else ()
        found: dict[str, str] = {}
        for name in {*claimed, *(device.id for device in inventory.devices)}:
            if (test := surrounding_test(folder, name)) is not None:
                found[name] = f"this session runs inside the test that holds it: {test}"
        if held is not None and claimed and found.keys() >= {*claimed}:
            return Path(held.inner_lock_folder), {}
        return folder, found

    def _open_requests(self) -> list[_Wait]:
        """Return the waiting requests that have not been cancelled, in the order of their arrival."""
        return [wait for wait in self._waiting.values() if not wait.is_over.done()]

    def _requests(self) -> list[policy.Request]:
        return [wait.request for wait in self._open_requests()]

    def _ahead_of(self, wait: _Wait) -> Iterator[Holder]:
        """Yield the holders of earlier requests that wait for the same devices or slots."""
        mine = wait.request
        for other in self._open_requests():
            if other is wait:
                return
            if (mine.slots and other.request.slots) or not set(mine.candidates).isdisjoint(other.request.candidates):
                yield other.demand.holder

    def _holder(self, device: str) -> Holder:
        """Return the holder of a leased device; of several, the earliest, with the tests and processes of all."""
        holders = [lease.holder for lease in self._leases.values() if device in lease.granted.devices]
        if len(holders) == 1:
            return holders[0]
        return replace(
            min(holders, key=lambda holder: holder.since),
            test=", ".join(dict.fromkeys(holder.test for holder in holders)),
            pids=tuple(pid for holder in holders for pid in holder.pids),
        )

    def _tell(self, devices: Iterable[str]) -> None:
        """Write the holders of these devices to their lock files, except of those that are free."""
        for device in devices:
            locks = self._devices[device][1].locks
            if locks is not None and self._free[device] < WHOLE:
                locks.describe(device, self._holder(device))

    # Locks

    def _lock(self, device: str) -> bool:
        """Lock a device unless it is locked, and return success: False if it must not or cannot be locked now."""
        kind = self._devices[device][1]
        if self._free[device] < WHOLE and (kind.locks is None or device in kind.locks):
            return True  # Other parts of it are leased.
        if kind.refuses(device) is not None:
            return False
        if kind.locks is None or device in kind.locks:
            return True
        if not kind.locks.lock(device):
            return False
        if kind.locks.is_wished_elsewhere(device):  # Asked last, so that no wish can come between.
            kind.locks.unlock(device)
            return False
        self._wished.discard(device)
        return True

    def _unlock(self, device: str) -> None:
        locks = self._devices[device][1].locks
        assert locks is not None
        locks.unlock(device)

    def _is_wished(self, device: str) -> bool:
        locks = self._devices[device][1].locks
        return locks is not None and locks.is_wished_elsewhere(device)

    def _leased(self) -> set[str]:
        return {device for lease in self._leases.values() for device in lease.granted.devices}

    def _kept(self) -> list[str]:
        """Return the devices that are locked without a lease."""
        return [device for locks in self._locks.values() for device in locks if self._free[device] == WHOLE]

    def _check_locks(self) -> None:
        for locks in self._locks.values():
            for device, why in locks.renew().items():
                for lease in [one for one in self._leases.values() if device in one.granted.devices]:
                    self._on_lost(lease, why)

    # Reactions to a change

    def _react(self) -> None:
        """Grant what can be granted, lock and unlock what that requires, and notify the holders of what is wanted."""
        self._has_changed = True
        if self._is_reacting or self._is_closed:
            return  # `on_wanted` has called, during a reaction; or nothing is granted any more.
        self._is_reacting = True
        try:
            while self._has_changed:
                self._has_changed = False
                self._grant()
                lacking = self._lacking()
                self._keep(lacking)
                self._wish(lacking)
                self._notify()
        finally:
            self._is_reacting = False
        self._set_interval()

    def _available(self) -> dict[str, int]:
        if not self._elsewhere:
            return self._free
        return {device: free for device, free in self._free.items() if device not in self._elsewhere}

    def _lacking(self) -> tuple[policy.Shortage, ...]:
        requests = self._requests() if self._waiting else ()
        return policy.shortages(requests, self._available(), self._free_slots) if requests else ()

    def _grant(self) -> None:
        while self._waiting:
            for granted in policy.decide(self._requests(), self._available(), self._free_slots):
                try:
                    lacks = next((one for one in dict.fromkeys(granted.devices) if not self._lock(one)), None)
                except LockFolderError as error:
                    self._end_wait(self._waiting[granted.id], error)
                    break
                if lacks is not None:
                    self._elsewhere.add(lacks)
                    break
                self._start(granted)
            else:
                return

    def _start(self, granted: policy.Lease) -> None:
        """Begin a lease whose devices are locked."""
        wait = self._waiting[granted.id]
        holder = replace(wait.demand.holder, since=wall_clock())
        found = [self._devices[device] for device in granted.devices]
        locks = found[0][1].locks if found else None
        lease = HeldLease(granted, tuple(device for device, _ in found), wait.demand, holder, locks)
        self._leases[granted.id] = lease
        self._free_slots -= granted.slots
        for device, taken in granted.takes():
            self._free[device] -= taken
        self._tell(lease.ids)
        self._end_wait(wait, lease)

    def _end_wait(self, wait: _Wait, outcome: HeldLease | LockFolderError) -> None:
        del self._waiting[wait.request.id]
        if isinstance(outcome, HeldLease) and outcome.locks is not None:
            outcome.locks.step_back(wait.request.candidates)  # The turn is over; for other requests, queue again.
        wait.outcome = outcome
        wait.is_over.set_result(None)

    def _keep(self, lacking: Sequence[policy.Shortage]) -> None:
        """Lock the devices that the policy keeps for waiting requests, and unlock others that no lease has."""
        kept: set[str] = set()
        for shortage in lacking:
            for device in shortage.claimed:
                locks = self._devices[device][1].locks
                if locks is None or self._free[device] < WHOLE or device in kept or device in self._elsewhere:
                    continue
                with suppress(LockFolderError):  # The attempt to grant the device reports it.
                    if self._lock(device):
                        kept.add(device)
                        locks.describe(device, self._waiting[shortage.request.id].demand.holder)
                    else:
                        self._elsewhere.add(device)
        for device in self._kept():
            if device not in kept:
                self._unlock(device)
        if self._elsewhere:
            self._elsewhere.intersection_update(one for shortage in lacking for one in shortage.request.candidates)

    def _wish(self, lacking: Sequence[policy.Shortage]) -> None:
        """Wish for all devices that requests could use which lack one that another session has."""
        wishes: dict[str, Holder] = {}
        for shortage in lacking:
            request = shortage.request
            if shortage.devices and not self._elsewhere.isdisjoint(request.candidates):
                holder = self._waiting[request.id].demand.holder
                for device in sorted(request.candidates)[: max(_MOST_WISHES, request.count)]:
                    wishes.setdefault(device, holder)
        for locks in self._locks.values():
            locks.wish({one: holder for one, holder in wishes.items() if self._devices[one][1].locks is locks})

    def _notify(self) -> None:
        """Set `HeldLease.wanted`, and notify the holders of those that have become wanted."""
        leases = [*self._leases.values()]
        requests = self._requests() if self._waiting else ()
        granted = [lease.granted for lease in leases]
        wanted = set(policy.wanted(requests, self._available(), self._free_slots, granted)) if requests else set()
        for lease in leases:
            before = lease.wanted
            lease.wanted = lease.granted.id in wanted or not self._wished.isdisjoint(lease.granted.devices)
            if lease.wanted and not before:
                self._on_wanted(lease)
                if self._has_changed:
                    return  # The holder has given something back, which may suffice.

    # The pauses of `run`

    async def _sleep(self) -> None:
        """Sleep for `_interval` seconds, which may change meanwhile."""
        loop, begin = get_running_loop(), monotonic()
        while (left := begin + self._interval - monotonic()) > 0:
            alarm = self._alarm = loop.create_future()
            timer = None if left == math.inf else loop.call_later(left, _ring, alarm)
            try:
                await alarm
            finally:
                self._alarm = None
                if timer is not None:
                    timer.cancel()

    def _set_interval(self) -> None:
        before, self._interval = self._interval, math.inf
        if self._elsewhere or self._kept():
            is_queued = any(locks.is_queued for locks in self._locks.values())
            is_fast = is_queued and monotonic() - self._last_change < _FAST_TIME
            self._interval = _FAST_POLL if is_fast else _POLL
        elif any(map(len, self._locks.values())):
            self._interval = _LOOK
        if self._interval < before and self._alarm is not None:
            _ring(self._alarm)


def _ring(alarm: Future[None]) -> None:
    if not alarm.done():
        alarm.set_result(None)


def _need(demand: WorldDemand) -> DeviceNeed | None:
    """Return the devices that `demand` needs on this machine; None: CPU slots, one for each rank."""
    key = demand.key
    return key.needs((0,) * key.ranks).get(0) if key.ranks else key.need


def _usable(kind: _Kind) -> Inventory:
    """Return the session's inventory of a kind without the devices that were set aside since it started."""
    if not (aside := kind.set_aside):
        return kind.inventory
    return replace(kind.inventory, devices=tuple(one for one in kind.inventory.devices if one.id not in aside))


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


def _held(number: int) -> str:
    return "is held" if number == 1 else "are held"


def _in_words(holder: Holder) -> str:
    """Return a description of the holder: ``pid 71 (ada) for test_big.py::test_one since 10:15:00``."""
    if not holder.pid:
        return str(holder)
    moment = localtime(holder.since)
    today = moment[:3] == localtime()[:3]
    return f"{holder} since {strftime('%H:%M:%S' if today else '%Y-%m-%d %H:%M:%S', moment)}"
