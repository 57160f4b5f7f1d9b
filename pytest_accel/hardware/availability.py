"""Whether a device may be handed out now: asked of its driver again and again, where that can tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import Device
from pytest_accel.core.units import format_memory
from pytest_accel.hardware.health import Health, HealthVendor

PATIENCE = 30.0
"""Seconds in which the memory of a device must come back when the processes that used it have been killed."""
_SLACK = 512 * 1024**2
"""Bytes that others (a desktop, the driver itself) may have taken since the session began."""
_FRESH = 0.25
"""Seconds for which the driver is not asked again: on some machines it takes tens of milliseconds to answer."""


def recovery(before: int | None, health: Health, waited: float) -> Literal["there", "waits"] | str:
    """What to make of a device `waited` seconds after its processes were killed; any other word is why it is set aside.

    `before` are the bytes that were free when the session began. Where other processes are told to use it, or nothing
    is told of its memory, what is missing cannot be laid to the dead.
    """
    if health.state == "sick":
        return health.reason
    used_by_others = health.state == "busy" and not health.unseen
    if before is None or health.memory_free is None or used_by_others or health.memory_free + _SLACK >= before:
        return "there"
    if waited < PATIENCE:
        return "waits"
    missing = format_memory(before - health.memory_free)
    return f"{missing} of its memory have not come back within {PATIENCE:g} s of the end of the processes that used it"


class Guard:
    """Watches over the `devices` of one kind, for the session whose main process is `session`. Thread-safe.

    `waits` is ``--accel-busy wait``: a device that others use may not be handed out until they are done.
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
        self._aside: dict[str, str] = {}
        self._seen: dict[str, tuple[float, Health]] = {}

    @property
    def aside(self) -> dict[str, str]:
        """The devices that are never handed out again in this session, and why."""
        with self._lock:
            return dict(self._aside)

    def suspect(self, ids: Iterable[str]) -> None:
        """The processes that used these devices have been killed: what they held must come back first."""
        with self._lock:
            for name in ids:
                self._suspects[name] = None
                self._seen.pop(name, None)

    def refuses(self, name: str) -> str | None:
        """Why the device may not be handed out now, in words to follow its id; None: it may."""
        with self._lock:
            if name in self._aside:
                return self._aside[name]
            if name not in self._suspects and not self._waits:
                return None
            health = self._health(name)
            if name in self._suspects:
                # From the first look on: until then others may have had a part of the device.
                since = self._suspects[name] = self._suspects[name] or self._clock()
                found = recovery(self._devices[name].memory_free, health, self._clock() - since)
                if found == "waits":
                    return "waits for its memory to come back"
                del self._suspects[name]
                if found != "there":
                    self._aside[name] = found
                    return found
            return health.reason if self._waits and health.state == "busy" else None

    def _health(self, name: str) -> Health:
        now = self._clock()
        if name not in self._seen or now - self._seen[name][0] >= _FRESH:
            self._seen[name] = (now, self._vendor.health([self._devices[name]], self._session)[name])
        return self._seen[name][1]
