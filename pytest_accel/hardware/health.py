"""The health of a device, judged from what its driver reports, and whether the device may be leased now."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, runtime_checkable

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.units import format_memory

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
    memory_free: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """State of a device: a sick device is never leased; a busy device is used by processes outside this session."""

    state: Literal["fine", "busy", "sick"] = "fine"
    reason: str = ""
    """Text that follows the device's name: ``is used by pid 71 (python3, 2 GiB)``."""
    memory_free: int | None = None
    """Bytes that are free now."""


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
    others = [_holder(pid, used, names) for pid, used in facts.processes.items() if pid not in own]
    if others:
        return Health("busy", f"is used by {', '.join(others)}", facts.memory_free)
    return Health(memory_free=facts.memory_free)


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
        vendor: HealthVendor,
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
        self._suspects: dict[str, float | None] = {}
        """By device whose processes have been killed: the time of the first check after the kill.

        The wait begins with this check: until then, other tests may have used shares of the device.
        """
        self.aside: dict[str, str] = {}
        """Reasons, by id, for the devices that are not leased again in this session."""
        self._expected = {device.id: device.memory_free for device in devices}
        """For each device, the bytes that were free at the session's start, or after the last wait that timed out."""
        self._cache: dict[str, tuple[float, Health]] = {}

    def suspect(self, name: str) -> None:
        """Check this device before it is leased again, because processes on it have been killed."""
        self._suspects[name] = None
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
            if not self._has_recovered(name, health.memory_free):
                return "waits for its memory to be released"
        return health.reason if self._waits and health.state == "busy" else None

    def _has_recovered(self, name: str, free: int | None) -> bool:
        """Return whether the `free` memory of a device is that of the session's start, or the wait for it is over."""
        now, expected = self._clock(), self._expected[name]
        since = self._suspects[name]
        since = self._suspects[name] = now if since is None else since
        if expected is not None and free is not None and free + _SLACK < expected:
            if now - since < RECOVERY_TIMEOUT:
                return False
            self._expected[name] = free  # Others have it. Do not wait for it a second time.
        del self._suspects[name]
        return True

    def _health(self, name: str) -> Health:
        now = self._clock()
        if name not in self._cache or now - self._cache[name][0] >= _CACHE_TIME:
            self._cache[name] = (now, self._vendor.health([self._devices[name]], self._session)[name])
        return self._cache[name][1]
