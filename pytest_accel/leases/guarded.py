"""Device locks that cannot be acquired while a health check refuses the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytest_accel.leases.locks import DeviceLocks, Holder


class GuardedLocks(DeviceLocks):
    """Device locks that refuse a device as long as ``refuses(device_id)`` returns a reason.

    To the broker, a refused device looks like one that another session holds, so the broker tries again.
    """

    def __init__(self, refuses: Callable[[str], str | None], folder: Path | None = None) -> None:
        super().__init__(folder)
        self._refuses = refuses

    def try_acquire(self, device_id: str, holder: Holder) -> bool:
        """Acquire like `DeviceLocks.try_acquire`; return False also if the device is refused."""
        return self._refuses(device_id) is None and super().try_acquire(device_id, holder)
