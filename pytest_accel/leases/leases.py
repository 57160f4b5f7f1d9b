"""The leases of a session: the devices and CPU slots of this machine, granted one request after the other.

One queue holds the requests for all kinds of devices: requests for different kinds have no candidates in common.
"""

from __future__ import annotations

from asyncio import CancelledError, Future, TimerHandle, get_running_loop, sleep
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from pytest_accel.compat import loop_tasks
from pytest_accel.core.clock import monotonic, wall_clock
from pytest_accel.core.device import Device, DeviceNeed, is_private
from pytest_accel.core.truncation import cut_end
from pytest_accel.core.units import count_text
from pytest_accel.hardware.device_order import ties
from pytest_accel.hardware.health import Guard
from pytest_accel.hardware.inventory import Inventory, Machine
from pytest_accel.hardware.matching import candidates, in_words, shortfall
from pytest_accel.hardware.shares import WHOLE, parts
from pytest_accel.leases import policy
from pytest_accel.leases.demand import Holder, WorldDemand
from pytest_accel.leases.locks import SessionLocks, who_holds, who_keeps
from pytest_accel.leases.shared_folder import LockFolderError, PlaceError, default_folder

_FAST_POLL = 0.002
"""Seconds between two attempts to lock devices of other sessions, for `_FAST_TIME` after a change in this session."""
_FAST_TIME = 1.0
"""Seconds after a change in this session in which other sessions are likely to react to it."""
_POLL = 0.02
"""Seconds between two attempts otherwise. Sessions send each other no notices."""
_LOOK = 0.1
"""Seconds between two looks whether other sessions wait for devices of this one. It is the length of a session's turn:
tests that are shorter run one after the other on the same warm processes, even if others wait."""
_LONGEST_LIST = 200
"""Maximum characters of the names of devices in a line about a wait: there are many memory parts."""


@dataclass(eq=False, slots=True)
class HeldLease:
    """One request for devices or CPU slots; once it is granted, the lease, until :meth:`Leases.give_back`."""

    request: policy.Request
    demand: WorldDemand
    need: DeviceNeed | None
    """The devices that are needed on this machine; None for CPU slots."""
    only: Collection[str] | None
    """The ids of the devices that may be leased; None for all."""
    holder: Holder
    """The present holder, as other sessions see it."""
    pids: Sequence[int] = ()
    """The processes that use the devices, as far as known."""
    outcome: Future[HeldLease] = field(default_factory=lambda: get_running_loop().create_future())
    granted: policy.Lease = field(init=False)
    devices: tuple[Device, ...] = ()
    """Devices in the order of the policy; none for CPU slots."""
    locks: SessionLocks | None = None
    """The locks of the devices; None if they are not shared with other sessions."""
    wanted: bool = False
    """True while another request, of this or another session, waits for devices or slots of the lease."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the locks of the devices, for the processes that use these."""
        locks = self.locks
        return () if locks is None else tuple(map(locks.descriptor, self.ids))

    @property
    def ids(self) -> tuple[str, ...]:
        """The id of each device, once."""
        return tuple(dict.fromkeys(self.granted.devices))


@dataclass(frozen=True, slots=True)
class _Kind:
    """The devices of one kind, from their first use in the session."""

    inventory: Inventory
    locks: SessionLocks | None
    guard: Guard

    def usable(self, only: Collection[str] | None) -> Inventory:
        """Return the session's inventory without the devices that were set aside since it started, and with `only`."""
        if not self.guard.aside and only is None:
            return self.inventory
        devices = (one for one in self.inventory.devices if one.id not in self.guard.aside)
        return replace(self.inventory, devices=tuple(one for one in devices if only is None or one.id in only))


class Leases:
    """The devices and CPU slots of this machine, for one session. All calls are made in the thread of one event loop.

    The policy decides which requests are granted. It counts a device as free unless another session, or another process
    of this session, has the lock (`_elsewhere`). Devices that are to be granted are locked first, all or none.
    """

    def __init__(self, machine: Machine, slots: int, on_wanted: Callable[[], object], *, waits_for_busy: bool) -> None:
        """`slots` is the number of CPU slots. `waits_for_busy` is True for ``accel_busy = wait``.

        ``on_wanted()`` is called after `HeldLease.wanted` has become True for a lease, as soon as `take` has returned
        the lease: a holder that only keeps it for later use should give it back; a running test goes on. It may call
        any method.
        """
        self.machine = machine
        self._slots = self._free_slots = slots
        self._on_wanted = on_wanted
        self._waits_for_busy = waits_for_busy
        self._kinds: dict[str, _Kind] = {}
        self._devices: dict[str, tuple[Device, _Kind]] = {}
        self._free: dict[str, int] = {}
        """The free parts of each device, even if another session has its lock."""
        self._numbers = count(1)
        self._leases: dict[int, HeldLease] = {}
        self._waiting: dict[int, HeldLease] = {}
        """The waiting requests, in the order of their arrival."""
        self._elsewhere: set[str] = set()
        """Devices without a lease that could not be locked at the last attempt."""
        self._wished: set[str] = set()
        """Devices of this session for which another session waited at the last look."""
        self._retry: TimerHandle | None = None
        """The next attempt to lock the devices in `_elsewhere`."""
        self._last_change = 0.0
        """Time of the last request or return in this session (`clock.monotonic`)."""

    # For the pool

    async def take(
        self, demand: WorldDemand, need: DeviceNeed | None = None, only: Collection[str] | None = None
    ) -> HeldLease:
        """Wait for a lease for `demand`, and return it; at once if that is possible. A cancellation undoes all of it.

        Raises :class:`~pytest_accel.leases.shared_folder.PlaceError` if devices cannot be locked, or if too many of
        them are set aside in this session, also while this waits; ValueError for a demand that can never be met.

        `need` describes the devices on this machine, in place of the demand's own need, and `only` has the ids of the
        devices that may be leased.
        """
        need = need or _need(demand)
        self._check_available(demand, need, only)
        request = self._request(demand, need, only)
        policy.check_request(request, self._slots)
        self._last_change = monotonic()
        lease = self._waiting[request.id] = HeldLease(request, demand, need, only, demand.holder)
        try:
            self._react()
            return await lease.outcome
        except CancelledError:
            if request.id in self._leases:  # It was granted, and then cancelled before this coroutine has run again.
                self.give_back(lease)
            raise
        finally:
            if self._waiting.pop(request.id, None) is not None:
                self._react()  # The request was not granted. Its claims are gone, so others may be granted.

    def hand_on(self, lease: HeldLease) -> WorldDemand | None:
        """Give a lease, with the processes on its devices, to the request that waits longest for one of the devices.

        Cancel the request's call of :meth:`take`, and return its demand. Return None, without effect, if the request
        has another key, or if another session waits for a device.
        """
        if lease.granted.id not in self._leases or not self._wished.isdisjoint(lease.granted.devices):
            return None
        ids = {*lease.ids}
        rivals = (one for one in self._open_requests() if not ids.isdisjoint(one.request.candidates))
        wait = next(rivals, None)
        # Compare the candidates even if the keys are equal: a device may have been set aside.
        if wait is None or wait.demand.key != lease.demand.key or not ids.issubset(wait.request.candidates):
            return None
        del self._waiting[wait.request.id]
        wait.outcome.cancel()
        self._react()
        return wait.demand

    def give_back(self, lease: HeldLease, *, killed: bool = False) -> None:
        """Return a lease, after its processes have ended as far as is known; no effect if it was returned before.

        If they were `killed`, its devices are not leased again before they have released the devices' memory.
        """
        if self._leases.pop(lease.granted.id, None) is None:
            return
        self._last_change = monotonic()
        self._free_slots += lease.granted.slots
        for device, taken in lease.granted.takes():
            self._free[device] += taken
        for device in lease.ids if killed else ():
            self._devices[device][1].guard.suspect([device], lease.pids)
        # Unlock devices even if they are needed again at once: a process that the lease has left keeps the lock, and
        # they must not be granted before it has ended.
        self._unlock(lease.ids)
        self._tell(lease.ids)
        self._react()

    def describe(self, lease: HeldLease, test: str, pids: Sequence[int]) -> None:
        """Tell other sessions which test uses the lease from now on, in `pids`; no-op if it was returned."""
        if lease.granted.id in self._leases:
            lease.holder, lease.pids = replace(lease.holder, test=test, since=wall_clock()), pids
            self._tell(lease.ids)

    def waiting(self, demand: WorldDemand) -> tuple[str, list[str]] | None:
        """Return what the request for this very `demand` waits for, and why; None if it does not wait.

        The result is a text, such as ``2 cuda devices with >= 40 GiB`` or ``3 CPU slots``, and a line for each reason.
        """
        requests = self._open_requests()
        wait = next((one for one in requests if one.demand is demand), None)
        if wait is None:
            return None
        mine, ahead = wait.request, requests[: requests.index(wait)]
        held: dict[str, list[str]] = {}
        """The devices that each holder has."""
        refused: list[str] = []
        earlier = []
        for device in mine.candidates:
            kind, holder = self._devices[device][1], None
            if self._free[device] < WHOLE:
                holder = self._holder(device)
            elif kind.locks is not None:
                with suppress(LockFolderError):  # The holder is unknown.
                    holder = who_keeps(kind.locks.folder, device)
                    earlier += [] if kind.locks.wishes(device) else [who_holds(kind.locks.folder, device, "wish")]
            if holder is not None:
                held.setdefault(str(holder), []).append(device)
            elif (why := kind.guard.refuses(device)) is not None:
                refused.append(f"{device} {why}")
        earlier += [one.demand.holder for one in ahead if _are_rivals(mine, one.request)]
        users = [(one.granted.slots, one.holder) for one in self._leases.values() if one.granted.slots and mine.slots]
        what = count_text(mine.slots, "CPU slot") if wait.need is None else in_words(wait.need, demand.key.kind)
        return what, [
            *(f"{count} of {self._slots} {_held(count)} by {by}" for count, by in users),
            *(f"{cut_end(', '.join(names), _LONGEST_LIST)} {_held(len(names))} by {by}" for by, names in held.items()),
            *refused,
            *(f"{one} has waited longer" for one in dict.fromkeys(earlier) if one is not None),
        ]

    async def run(self) -> None:
        """Poll the wishes of other sessions, which send no notices, and check this session's locks, while it lives.

        Raise :class:`~pytest_accel.leases.shared_folder.LockFolderError` once a lock is lost: the ranks must end.
        """
        while True:
            await sleep(_LOOK)
            self._wished = {one for locks in self._locks for one in locks if locks.is_wished_elsewhere(one)}
            for locks in self._locks:
                locks.check()
            for wait in self._open_requests():
                try:
                    self._check_available(wait.demand, wait.need, wait.only)
                except PlaceError as error:
                    loop_tasks.fail(wait.outcome, error)
            self._react()

    def close(self) -> None:
        """Drop all leases and requests, without calls of `on_wanted`. No other is requested after this."""
        if self._retry is not None:
            self._retry.cancel()
        for wait in self._waiting.values():
            wait.outcome.cancel()
        self._leases.clear()
        for locks in self._locks:
            locks.close()

    # Requests and devices

    def _request(self, demand: WorldDemand, need: DeviceNeed | None, only: Collection[str] | None) -> policy.Request:
        """Return a new request for `demand`."""
        number = next(self._numbers)
        if need is None:
            return policy.Request(number, (), 0, slots=min(demand.key.ranks, self._slots))
        fitting = candidates(need, self._kind(demand.key.kind).usable(only))
        return policy.Request(
            number,
            tuple(device.id for device in fitting),
            need.count,
            ties=tuple(ties(fitting, need.near)) if need.count > 1 and need.share is None else (),
            parts=tuple(parts(need.share, device) or WHOLE for device in fitting) if need.share else (),
            sets=need.sets,
        )

    def _check_available(self, demand: WorldDemand, need: DeviceNeed | None, only: Collection[str] | None) -> None:
        """Raise :class:`PlaceError` if `need` cannot be met any more, since devices were set aside in this session."""
        if need is not None and (aside := self._kind(demand.key.kind).guard.aside):
            missing = shortfall(need, self._kind(demand.key.kind).usable(only))
            if missing is not None:
                lines = (f"{name} was set aside: {why}" for name, why in aside.items())
                raise PlaceError("\n".join([missing, *lines]))

    def _kind(self, name: str) -> _Kind:
        if name not in self._kinds:
            inventory, vendor = self.machine.of(name), self.machine.vendor(name)
            guard = Guard(vendor, inventory.devices, self.machine.main_pid, waits=self._waits_for_busy)
            locks = None if is_private(vendor) else SessionLocks(self._lock_folder(name))
            kind = self._kinds[name] = _Kind(inventory, locks, guard)
            for device in inventory.devices:
                self._devices[device.id] = device, kind
                self._free[device.id] = WHOLE
        return self._kinds[name]

    @property
    def _locks(self) -> list[SessionLocks]:
        """The locks of each kind that has any."""
        return [kind.locks for kind in self._kinds.values() if kind.locks is not None]

    def _lock_folder(self, kind: str) -> Path:
        """Return the folder for the locks of the devices of `kind`."""
        folder, held = default_folder(), self.machine.held
        if held is not None and (held.kind, held.lock_folder) == (kind, str(folder)):
            # This session runs inside a rank, whose devices it leases with locks that only sessions inside it use: the
            # test may wait for this session, which must not wait for the locks of the test.
            return Path(held.inner_lock_folder)
        return folder

    def _open_requests(self) -> list[HeldLease]:
        """Return the waiting requests that have not been cancelled, in the order of their arrival."""
        return [wait for wait in self._waiting.values() if not wait.outcome.done()]

    def _holder(self, device: str) -> Holder:
        """Return the holder of a leased device; of several, the earliest holder with the tests of all."""
        holders = [lease.holder for lease in self._leases.values() if device in lease.granted.devices]
        earliest = min(holders, key=lambda holder: holder.since)
        return replace(earliest, test=", ".join(dict.fromkeys(holder.test for holder in holders)))

    def _tell(self, devices: Iterable[str]) -> None:
        """Write the holders of `devices` to their lock files, except for free devices."""
        for device in devices:
            locks = self._devices[device][1].locks
            if locks is not None and self._free[device] < WHOLE:
                locks.describe(device, self._holder(device))

    # Locks

    def _lock(self, device: str) -> bool:
        """Lock a device unless it is locked, and return success: False if it must not or cannot be locked now."""
        kind = self._devices[device][1]
        if self._free[device] < WHOLE:
            return True  # Other parts of it are leased.
        if kind.guard.refuses(device) is not None:
            return False
        if kind.locks is None:
            return True
        if not kind.locks.lock(device):
            return False
        if kind.locks.is_wished_elsewhere(device):  # Asked last, so that no wish can come between.
            kind.locks.unlock(device)
            return False
        self._wished.discard(device)
        return True

    def _unlock(self, devices: Iterable[str]) -> None:
        """Unlock the `devices` that no lease has."""
        for device in devices:
            locks = self._devices[device][1].locks
            if locks is not None and self._free[device] == WHOLE:
                locks.unlock(device)

    # Reactions to a change

    def _react(self) -> None:
        """Grant requests, wish for devices of other sessions, and notify the holders if leases become wanted."""
        self._grant()
        self._wish()
        self._notify()
        if self._elsewhere and self._retry is None:
            # At one rate of 10 ms, the hand-over of a device between sessions takes twice as long.
            is_fast = monotonic() - self._last_change < _FAST_TIME
            self._retry = get_running_loop().call_later(_FAST_POLL if is_fast else _POLL, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self._elsewhere.clear()
        self._react()

    def _available(self) -> dict[str, int]:
        return {device: free for device, free in self._free.items() if device not in self._elsewhere}

    def _grant(self) -> None:
        while requests := [one.request for one in self._open_requests()]:
            for granted in policy.decide(requests, self._available(), self._free_slots):
                try:
                    lacks = next((one for one in dict.fromkeys(granted.devices) if not self._lock(one)), None)
                except LockFolderError as error:
                    self._unlock(granted.devices)
                    loop_tasks.fail(self._waiting.pop(granted.id).outcome, error)
                    break
                if lacks is not None:
                    self._unlock(granted.devices)
                    self._elsewhere.add(lacks)
                    break  # Decide again without this device: the request may take another.
                self._start(granted)
            else:
                return

    def _start(self, granted: policy.Lease) -> None:
        """Begin a lease whose devices are locked."""
        lease = self._leases[granted.id] = self._waiting.pop(granted.id)
        found = [self._devices[device] for device in granted.devices]
        lease.granted, lease.devices = granted, tuple(device for device, _ in found)
        lease.locks = found[0][1].locks if found else None
        lease.holder = replace(lease.holder, since=wall_clock())
        self._free_slots -= granted.slots
        for device, taken in granted.takes():
            self._free[device] -= taken
        self._tell(lease.ids)
        if lease.locks is not None:
            lease.locks.step_back(lease.request.candidates)  # This turn is over; other requests queue again.
        lease.outcome.set_result(lease)

    def _wish(self) -> None:
        """Wish for all candidates of each request that lacks a device which another session has."""
        requests = [one.request for one in self._open_requests()] if self._elsewhere else []
        lacking = [
            one.request
            for one in policy.shortages(requests, self._available(), self._free_slots)
            if one.devices and not self._elsewhere.isdisjoint(one.request.candidates)
        ]
        # Do not retry a device that no request lacks any more.
        self._elsewhere.intersection_update(device for request in lacking for device in request.candidates)
        wishes: dict[str, Holder] = {}
        for request in lacking:
            for device in request.candidates:
                wishes.setdefault(device, self._waiting[request.id].demand.holder)
        for locks in self._locks:
            locks.wish({one: holder for one, holder in wishes.items() if self._devices[one][1].locks is locks})

    def _notify(self) -> None:
        """Set `HeldLease.wanted`, and notify the holders if a lease has become wanted."""
        requests = [one.request for one in self._open_requests()]
        granted = [lease.granted for lease in self._leases.values()]
        wanted = policy.wanted(requests, self._available(), self._free_slots, granted) if requests else ()
        before = {lease.granted.id for lease in self._leases.values() if lease.wanted}
        for lease in self._leases.values():
            lease.wanted = lease.granted.id in wanted or not self._wished.isdisjoint(lease.granted.devices)
        if any(lease.wanted and lease.granted.id not in before for lease in self._leases.values()):
            # Not called from here: a holder may give something back, and `take` has not returned a new lease yet.
            get_running_loop().call_soon(self._on_wanted)


def _need(demand: WorldDemand) -> DeviceNeed | None:
    """Return the devices that `demand` needs on this machine, or None if it needs CPU slots, one for each rank."""
    key = demand.key
    return key.needs((0,) * key.ranks).get(0) if key.ranks else key.need


def _are_rivals(one: policy.Request, other: policy.Request) -> bool:
    """Return whether two requests wait for the same devices or slots."""
    return bool(one.slots and other.slots) or not set(one.candidates).isdisjoint(other.candidates)


def _held(number: int) -> str:
    return "is held" if number == 1 else "are held"
