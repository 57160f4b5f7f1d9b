"""The health of a device, judged from what its driver reports, and whether the device may be leased now."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device, Vendor
from pytest_accel.core.units import format_memory

IDLE_MEMORY = 2 * 1024**3
"""Bytes that the driver (some 600 MiB) and a desktop may use on an otherwise idle device."""
ComputeMode = Literal["default", "exclusive_process", "prohibited"]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a device that its driver reports. A missing fact counts as normal."""

    processes: Mapping[int, int | None] = field(default_factory=dict)
    """The processes that have a compute context on the device, by pid, with the bytes of its memory that each uses.

    None if the driver does not report the bytes.
    """
    ecc_errors: int = 0
    """Uncorrectable memory errors since the driver was loaded."""
    retirement_pending: bool = False
    """True if a defective memory page stays in use until the driver is reloaded."""
    remap_failed: bool = False
    """True if a defective memory row could not be remapped."""
    compute_mode: ComputeMode = "default"
    lost: bool = False
    """True if the driver cannot reach the device any more."""
    memory_used: int | None = None
    """Bytes in use by any process or by the driver itself."""
    memory_free: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """State of a device: a sick device is never leased; a busy device is used by processes outside this session."""

    state: Literal["fine", "busy", "sick"] = "fine"
    reason: str = ""
    """Text that follows the device's name: ``is used by pid 71 (python3, 2 GiB)``."""
    memory_free: int | None = None
    """Bytes that are free now."""
    pids: frozenset[int] = frozenset()
    """The processes that the driver lists, of this session and of others."""
    sees_users: bool = False
    """True if the driver lists processes, and all of them can be seen here. In a container they often cannot."""


@runtime_checkable
class HealthVendor(Protocol):
    """Additional method of a :class:`~pytest_accel.core.device.Vendor` whose driver reports the users of a device.

    ``accel_busy`` uses it, and so does the pool, to wait until the memory of a device is free again.
    """

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        """Return the current health of each of `devices`, by its id.

        `session` is the pid of the session's main process (this one if None). It and its descendants do not make a
        device busy.
        """
        ...


def judge(facts: Facts, own: Collection[int] = (), names: Mapping[int, str] = MappingProxyType({})) -> Health:
    """Return the health of a device with these `facts`: sick, else busy, else fine.

    `own` are the pids of the session's processes, which do not make a device busy. `names` has the names of the
    processes that can be seen here, by pid.
    """
    sickness = _sickness(facts)
    if sickness:
        return Health("sick", sickness, facts.memory_free)
    others = {pid: used for pid, used in facts.processes.items() if pid not in own}
    reason = ""
    if others:
        reason = "is used by " + ", ".join(_holder(pid, used, names) for pid, used in others.items())
    # In a container the driver may hide processes, so much used memory without any process makes a device busy, too.
    elif not facts.processes and (facts.memory_used or 0) > IDLE_MEMORY:
        used = format_memory(facts.memory_used or 0)
        reason = f"has {used} of its memory in use, but no process on it is visible from here"
    pids = frozenset(facts.processes)
    sees_users = bool(pids) and pids <= names.keys()
    return Health("busy" if reason else "fine", reason, facts.memory_free, pids, sees_users)


def judge_all(facts: Mapping[str, Facts], session: int | None) -> dict[str, Health]:
    """Return the health of each device, by its id, from its `facts`.

    `session` is a pid (this process's if None). It and its descendants do not count as users of a device.
    """
    own: set[int] = set()
    names: dict[int, str] = {}
    pids = {pid for one in facts.values() for pid in one.processes}
    if pids:
        # Imported here, since it takes some 10 ms and is needed only if a device is in use.
        import psutil

        main = os.getpid() if session is None else session
        for pid in pids:
            # A process that is not visible here, such as one outside of the container, is in neither.
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                names[pid] = process.name()
                if main in (pid, *(parent.pid for parent in process.parents())):
                    own.add(pid)
    return {name: judge(one, own, names) for name, one in facts.items()}


def _sickness(facts: Facts) -> str:
    if facts.lost:
        return "its driver cannot reach it any more"
    if facts.compute_mode == "prohibited":
        return "its compute mode is PROHIBITED"
    if facts.remap_failed:
        return "it has failed to replace a broken row of its memory"
    if facts.retirement_pending:
        return "it has broken memory pages that stay in use until the driver is reloaded"
    if facts.ecc_errors:
        several = f"{facts.ecc_errors} uncorrectable memory errors"
        errors = "an uncorrectable memory error" if facts.ecc_errors == 1 else several
        return f"it has had {errors} (ECC) since its driver was loaded"
    return ""


def _holder(pid: int, used: int | None, names: Mapping[int, str]) -> str:
    details = [names.get(pid) or "not visible from here"]
    if used is not None:
        details.append(format_memory(used))
    return f"pid {pid} ({', '.join(details)})"


RECOVERY_TIMEOUT = 5.0
"""Seconds for which a device is not leased after a kill, at most. Drivers need up to about 2 s to free a large GPU."""
_SLACK = 512 * 1024**2
"""Bytes that others (a desktop, the driver itself) may have allocated since the session started."""
_CACHE_TIME = 0.25
"""Seconds for which a result is cached, since on some machines the driver takes tens of milliseconds to answer."""


class Guard:
    """Decides which `devices` of one kind may be leased now.

    `session` is the pid of the session's main process. `waits` is True for ``accel_busy = wait``: a device that other
    processes use may not be leased until they have finished.
    """

    def __init__(
        self,
        vendor: Vendor | HealthVendor,
        devices: Sequence[Device],
        session: int,
        *,
        waits: bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._vendor = vendor
        self._devices = {device.id: device for device in devices}
        self._session = session
        self._waits = waits
        self._clock = clock
        self._suspects: dict[str, tuple[frozenset[int], float | None]] = {}
        """By device that may not have recovered: its killed processes, and the time of the first check after the kill.

        The wait begins with this check: until then, other tests may have used shares of the device.
        """
        self.aside: dict[str, str] = {}
        """Reasons, by id, for the devices that are not leased again in this session."""
        self._expected = {device.id: device.memory_free for device in devices}
        """For each device, the bytes that were free at the session's start, or after the last wait that timed out."""
        self._occupied = {
            device.id for device in devices if (device.memory or 0) - (device.memory_free or 0) > IDLE_MEMORY
        }
        """Ids of the devices with much memory in use when the session started, and since then."""
        self._cache: dict[str, tuple[float, Health]] = {}

    def suspect(self, ids: Iterable[str], killed: Collection[int]) -> None:
        """Check these devices before they are leased again, because their processes `killed` have been killed."""
        for name in ids:
            before, _ = self._suspects.get(name, (frozenset[int](), None))
            self._suspects[name] = before.union(killed), None
            self._cache.pop(name, None)

    def refuses(self, name: str) -> str | None:
        """Return why the device may not be leased now, as text that follows its id, or None if it may."""
        if name in self.aside:
            return self.aside[name]
        if name not in self._suspects and not self._waits:
            return None
        health = self._health(name)
        if name in self._suspects:
            # Only a fault that the driver itself reports sets a device aside. Memory in use makes tests wait for a
            # bounded time: it may belong to other programs, or to the session's own main process.
            if health.state == "sick":
                self.aside[name] = health.reason
                return health.reason
            if not self._has_recovered(name, health):
                return "waits for its memory to be released"
        if not self._waits:
            return None
        # Memory that the driver attributes to no process may be this session's, unless it was in use from the start.
        if health.state == "busy" and (health.pids or name in self._occupied):
            return health.reason
        self._occupied.discard(name)
        return None

    def _has_recovered(self, name: str, health: Health) -> bool:
        now = self._clock()
        killed, since = self._suspects[name]
        since = now if since is None else since
        self._suspects[name] = killed, since
        expected, free = self._expected[name], health.memory_free
        is_short = expected is not None and free is not None and free + _SLACK < expected
        # Wait only for the killed processes: living ones, of this session or of others, keep their memory. If the
        # driver lists processes that cannot be seen here, or none, as in a container, the memory may be theirs.
        is_awaited = not health.sees_users or bool(killed & health.pids)
        if is_short and is_awaited and now - since < RECOVERY_TIMEOUT:
            return False
        del self._suspects[name]
        if not health.sees_users and expected is not None and free is not None:
            # Nobody can say whether memory that is missing now is missing again. Do not wait for it a second time.
            self._expected[name] = min(expected, free)
        return True

    def _health(self, name: str) -> Health:
        now = self._clock()
        if name not in self._cache or now - self._cache[name][0] >= _CACHE_TIME:
            health = Health()
            if isinstance(self._vendor, HealthVendor):
                health = self._vendor.health([self._devices[name]], self._session)[name]
            self._cache[name] = now, health
        return self._cache[name][1]
