"""A hypothetical machine for planning: a number of devices of a kind, without further properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.hardware.inventory import Inventory, KindSpec, Machine


class PretendedMachine(Machine):
    """A machine with `count` devices of `kind` and none of other kinds. It does not access the real machine."""

    def __init__(self, count: int, kind: str, resources: Mapping[str, int] = MappingProxyType({})) -> None:
        """See :class:`Machine` for `resources`."""
        super().__init__(KindSpec(kind), resources=resources)
        devices = tuple(Device(kind, f"{kind}-{number}", number, "pretended") for number in range(count))
        self.session = Inventory(kind, devices, present=count, visible=count)

    def of(self, kind: str) -> Inventory:
        """Return the devices of `kind`."""
        return super().of(kind) if kind in (self.session.kind, *self.resources) else Inventory(kind)


def without_figures(need: DeviceNeed) -> DeviceNeed:
    """Return `need` without requirements that a pretended device cannot answer: memory, capability and name.

    A share in bytes becomes the whole device.
    """
    share = need.share if need.share is not None and need.share.bytes is None else None
    return replace(need, memory=None, capability=None, name=None, share=share)
