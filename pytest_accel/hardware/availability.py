"""Checks, by repeated queries of the device driver, of whether a device may be leased now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.units import format_memory
from pytest_accel.hardware.health import Health, HealthVendor

RECOVERY_TIMEOUT = 30.0
"""Seconds within which the memory of a device must be released after the processes that used it were killed."""
_SLACK = 512 * 1024**2
"""Bytes that others (a desktop, the driver itself) may have allocated since the session started."""
_CACHE_TIME = 0.25
"""Seconds for which a result is cached, since on some machines the driver takes tens of milliseconds to answer."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """State of a device whose processes were killed."""

    state: Literal["recovered", "waiting", "failed"]
    """``recovered``: it can be leased; ``waiting``: its memory may still be released; ``failed``: set it aside."""
    reason: str = ""
    """Reason of a failure."""


def recovery(before: int | None, health: Health, waited: float) -> Recovery:
    """Return the state of a device `waited` seconds after its processes were killed.

    `before` is the number of bytes that were free when the session started. If the driver reports other processes on
    the device, or no free memory, missing memory cannot be attributed to the killed processes.
    """
    if health.state == "sick":
        return Recovery("failed", health.reason)
    used_by_others = health.state == "busy" and not health.unseen
    if before is None or health.memory_free is None or used_by_others or health.memory_free + _SLACK >= before:
        return Recovery("recovered")
    if waited < RECOVERY_TIMEOUT:
        return Recovery("waiting")
    missing = format_memory(before - health.memory_free)
    timeout = f"{RECOVERY_TIMEOUT:g} s"
    return Recovery(
        "failed", f"{missing} of its memory were not released within {timeout} after its processes were killed"
    )


class Guard:
    """Decides which `devices` of one kind may be leased now. Thread-safe.

    `session` is the pid of the session's main process. `waits` is ``--accel-busy wait``: a device that other processes
    use may not be leased until they have finished.
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
        self._lock = threading.Lock()
        self._suspects: dict[str, float | None] = {}
        """Time of the first check of each suspect device; None: not checked yet."""
        self._aside: dict[str, str] = {}
        self._cache: dict[str, tuple[float, Health]] = {}

    @property
    def aside(self) -> dict[str, str]:
        """Reasons, by id, for the devices that are not leased again in this session."""
        with self._lock:
            return dict(self._aside)

    def suspect(self, ids: Iterable[str]) -> None:
        """Check these devices before they are leased again, because processes that used them have been killed."""
        with self._lock:
            for name in ids:
                self._suspects[name] = None
                self._cache.pop(name, None)

    def refuses(self, name: str) -> str | None:
        """Return why the device may not be leased now, as text that follows its id, or None if it may."""
        with self._lock:
            if name in self._aside:
                return self._aside[name]
            if name not in self._suspects and not self._waits:
                return None
            health = self._health(name)
            if name in self._suspects:
                # The timeout starts with the first check: before it, other tests may have used shares of the device.
                since = self._suspects[name] = self._suspects[name] or self._clock()
                found = recovery(self._devices[name].memory_free, health, self._clock() - since)
                if found.state == "waiting":
                    return "waits for its memory to be released"
                del self._suspects[name]
                if found.state == "failed":
                    self._aside[name] = found.reason
                    return found.reason
            return health.reason if self._waits and health.state == "busy" else None

    def _health(self, name: str) -> Health:
        now = self._clock()
        if name not in self._cache or now - self._cache[name][0] >= _CACHE_TIME:
            self._cache[name] = (now, self._vendor.health([self._devices[name]], self._session)[name])
        return self._cache[name][1]
