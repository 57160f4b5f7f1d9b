"""A machine that is not here: so many devices of a kind, of which nothing else is known."""

from __future__ import annotations

from dataclasses import replace

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.kinds import check_kind
from pytest_accel.core.units import is_count
from pytest_accel.hardware.inventory import Inventory, KindSpec, Machine

MOST = 256
"""Devices that can be pretended."""


def parse_machine(text: str) -> tuple[int, str]:
    """The number and the kind that ``8xcuda`` names; ValueError for what is not of this form."""
    number, _, kind = text.strip().partition("x")
    if not is_count(number) or int(number) > MOST:
        raise ValueError(text)
    check_kind(kind)
    return int(number), kind


class PretendedMachine(Machine):
    """`count` devices of `kind`; of other kinds it has none. Nothing is looked up in the real machine."""

    def __init__(self, count: int, kind: str) -> None:
        super().__init__(KindSpec(kind))
        devices = tuple(Device(kind, f"{kind}-{number}", number, "pretended") for number in range(count))
        self.session = Inventory(kind, devices, present=count, visible=count)

    def of(self, kind: str) -> Inventory:
        """The devices of a kind."""
        return self.session if kind == self.session.kind else Inventory(kind)


def without_figures(need: DeviceNeed) -> DeviceNeed:
    """`need` but for what a pretended device cannot tell: memory, capability and name count as met.

    An amount of its memory counts as the whole device.
    """
    share = need.share if need.share is not None and need.share.bytes is None else None
    return replace(need, memory=None, capability=None, name=None, share=share)
