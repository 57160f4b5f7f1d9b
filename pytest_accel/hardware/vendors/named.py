"""Named resources (``accel_resources``): licenses, ports and the like, each a kind of its own with numbered devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KindFacts
from pytest_accel.hardware.vendors.base_vendor import BaseVendor


class Named(BaseVendor):
    """The vendor of the named resource `name`, with `count` devices: ``license-0``, ``license-1`` and so on.

    No mask hides them, and torch does not know them: ranks that lease one run on the CPU. Sessions share them by locks,
    as they do real devices.
    """

    def __init__(self, name: str, count: int) -> None:
        self.facts = KindFacts(name, hardware=False, backend="gloo", torch="cpu", torch_index=None)
        super().__init__()
        self._count = count

    def discover(self) -> tuple[Device, ...]:
        """Return the devices of the resource."""
        return tuple(Device(self.kind, f"{self.kind}-{index}", index, self.kind) for index in range(self._count))

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Do nothing: no variable hides a named resource."""
