"""Locks of devices that are not always fit to be taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_accel.leases.locks import DeviceLocks, Holder


class GuardedLocks(DeviceLocks):
    """A device of which `refuses` gives a reason counts as one that another session has: it is asked for again."""

    def __init__(self, refuses: Callable[[str], str | None], folder: Path | None = None) -> None:
        super().__init__(folder)
        self._refuses = refuses

    def try_acquire(self, device_id: str, holder: Holder) -> bool:
        """As `DeviceLocks.try_acquire`, and False too for a device that is refused."""
        return self._refuses(device_id) is None and super().try_acquire(device_id, holder)
