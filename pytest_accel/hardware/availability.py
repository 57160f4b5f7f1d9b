"""Checks, by repeated queries of the device driver, of whether a device may be leased now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.hardware.health import IDLE_MEMORY, Health, HealthVendor

RECOVERY_TIMEOUT = 5.0
"""Seconds for which a device is not leased after a kill, at most. Drivers need up to about 2 s to free a large GPU."""
SETTLE_TIME = 1.0
"""Seconds without a rise of the free memory after which no more is expected, if the driver does not say who uses it."""
_SLACK = 512 * 1024**2
"""Bytes that others (a desktop, the driver itself) may have allocated since the session started."""
_CACHE_TIME = 0.25
"""Seconds for which a result is cached, since on some machines the driver takes tens of milliseconds to answer."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A device whose processes were killed, since the first check after that."""

    killed: frozenset[int]
    """Pids of the killed processes."""
    since: float
    """Time of the first check. Other tests may have used shares of the device until then."""
    memory_free: int = 0
    """The largest number of free bytes so far."""
    risen: float = 0.0
    """Time at which `memory_free` has risen last."""

    def look(self, health: Health, now: float) -> Suspect:
        """Return this object after a check at time `now` that has found `health`."""
        if health.memory_free is None or health.memory_free <= self.memory_free:
            return self
        return replace(self, memory_free=health.memory_free, risen=now)


def has_recovered(expected: int | None, health: Health, suspect: Suspect, now: float) -> bool:
    """Return whether a device is usable again after its processes were killed.

    `expected` is the number of bytes that should be free. Only the killed processes are waited for: what living
    processes use, of this session or of others, stays in use. If the driver lists no process that can be seen here, as
    in a container, memory that is not free cannot be attributed, and the wait ends when no more becomes free.
    """
    if expected is None or health.memory_free is None or health.memory_free + _SLACK >= expected:
        return True
    if now - suspect.since >= RECOVERY_TIMEOUT:
        return True
    return not suspect.killed & health.pids and (health.sees_users or now - suspect.risen >= SETTLE_TIME)


class Guard:
    """Decides which `devices` of one kind may be leased now. Thread-safe.

    Only a fault that the driver itself reports sets a device aside. Everything that is inferred, such as from memory in
    use, makes a test wait for a bounded time: the cause may be processes of other programs, or the session's own main
    process.

    `session` is the pid of the session's main process. `waits` is ``accel_busy = wait``: a device that other processes
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
        self._killed: dict[str, frozenset[int]] = {}
        """The killed processes of each device that has not been checked since."""
        self._suspects: dict[str, Suspect] = {}
        self._aside: dict[str, str] = {}
        self._expected = {device.id: device.memory_free for device in devices}
        """Bytes that should be free on an unused device: at the session's start, or after the last wait in vain."""
        self._occupied = {
            device.id for device in devices if (device.memory or 0) - (device.memory_free or 0) > IDLE_MEMORY
        }
        """Devices of which much memory has been in use since the session started. Memory that the driver attributes to
        no process keeps only these from being leased: on others, the session's own processes may use it."""
        self._cache: dict[str, tuple[float, Health]] = {}

    @property
    def aside(self) -> Mapping[str, str]:
        """Reasons, by id, for the devices that are not leased again in this session."""
        with self._lock:
            return dict(self._aside)

    def suspect(self, ids: Iterable[str], killed: Collection[int]) -> None:
        """Check these devices before they are leased again, because their processes `killed` have been killed."""
        with self._lock:
            for name in ids:
                before = self._suspects.pop(name).killed if name in self._suspects else frozenset()
                self._killed[name] = self._killed.get(name, before) | frozenset(killed)
                self._cache.pop(name, None)

    def refuses(self, name: str) -> str | None:
        """Return why the device may not be leased now, as text that follows its id, or None if it may."""
        with self._lock:
            if name in self._aside:
                return self._aside[name]
            checked = name in self._killed or name in self._suspects
            if not checked and not self._waits:
                return None
            health = self._health(name)
            if checked:
                if health.state == "sick":
                    self._aside[name] = health.reason
                    return health.reason
                if not self._has_recovered(name, health):
                    return "waits for its memory to be released"
            if not self._waits:
                return None
            if health.state == "busy" and (health.pids or name in self._occupied):
                return health.reason
            self._occupied.discard(name)
            return None

    def _has_recovered(self, name: str, health: Health) -> bool:
        now = self._clock()
        if name in self._killed:
            self._suspects[name] = Suspect(self._killed.pop(name), now, risen=now)
        suspect = self._suspects[name] = self._suspects[name].look(health, now)
        expected, free = self._expected[name], health.memory_free
        if not has_recovered(expected, health, suspect, now):
            return False
        del self._suspects[name]
        if not health.sees_users and expected is not None and free is not None:
            # Nobody can say whether memory that is missing now is missing again. Do not wait for it a second time.
            self._expected[name] = min(expected, free)
        return True

    def _health(self, name: str) -> Health:
        now = self._clock()
        if name not in self._cache or now - self._cache[name][0] >= _CACHE_TIME:
            self._cache[name] = (now, self._vendor.health([self._devices[name]], self._session)[name])
        return self._cache[name][1]
