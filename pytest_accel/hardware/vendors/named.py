"""Named resources (``accel_resources``): licenses, ports and the like, each a kind of its own with numbered devices."""

from __future__ import annotations

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KindFacts
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

SMALLEST_MEMORY = 2**30
"""Bytes of the smallest ``memory``, and of its smallest device."""
_MEMORY_PARTS = 64
"""Largest number of devices into which ``memory`` is divided. A test locks a file for each of its devices."""


class Named(BaseVendor):
    """The vendor of the named resource `name`, with `number` devices: ``license-0``, ``license-1`` and so on.

    No mask hides them, and torch does not know them: ranks that lease them run on the CPU. Sessions share them by
    locks, as they do real devices. The number of ``memory`` is its bytes.
    """

    def __init__(self, name: str, number: int) -> None:
        super().__init__(KindFacts(name, hardware=False, backend="gloo", torch="cpu", torch_index=None))
        self._count, self._bytes = number, None
        if name == "memory":
            # Devices of 1 GiB, or of 2, 4, ... GiB if there were too many otherwise: sessions that name different
            # sizes then mostly have equal devices.
            self._bytes = SMALLEST_MEMORY
            while number // self._bytes > _MEMORY_PARTS:
                self._bytes *= 2
            self._count = number // self._bytes

    def discover(self) -> tuple[Device, ...]:
        """Return the devices of the resource."""
        ids = [f"{self.kind}-{index}" for index in range(self._count)]
        return tuple(Device(self.kind, name, index, self.kind, self._bytes) for index, name in enumerate(ids))
