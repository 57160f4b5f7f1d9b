"""Decisions on whether a device may be leased now, from repeated queries of its driver."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.hardware.health import IDLE_MEMORY, Health, HealthVendor

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
            self._cache[name] = (now, self._vendor.health([self._devices[name]], self._session)[name])
        return self._cache[name][1]
