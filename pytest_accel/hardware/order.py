"""In which order a session counts its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pytest_accel.core.device import Device, Vendor
from pytest_accel.hardware.topology import linked

How = Literal["fastest", "pci", "free", "near", "ids"]
_WORDS: tuple[How, ...] = tuple(how for how in get_args(How) if how != "ids")


@dataclass(frozen=True, slots=True)
class Order:
    """A parsed ``--accel-order``: one of its words, or the ids (or prefixes, or indices) that come first."""

    how: How
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(self.ids) if self.how == "ids" else self.how


def parse_order(text: str) -> Order:
    """``fastest``, ``pci``, ``free``, ``near`` or ``ID,ID…``; ValueError where an id is empty."""
    for how in _WORDS:
        if text.strip() == how:
            return Order(how)
    return Order("ids", parse_names(text, "--accel-order", _WORDS))


def parse_names(text: str, option: str, words: Sequence[str] = ()) -> tuple[str, ...]:
    """The entries of a list ``ID,ID…``; ValueError, naming `option` and its other `words`, where one is empty."""
    names = tuple(entry.strip() for entry in text.split(","))
    if not all(names):
        allowed = "".join(f"{word}, " for word in words)
        raise ValueError(f"{option} {text!r}: allowed are {allowed}device ids or indices with commas between them")
    return names


def apply_order(order: Order, devices: Sequence[Device], vendor: Vendor) -> tuple[Device, ...]:
    """All of `devices`, in `order`.

    ``free`` goes by the memory that was free at discovery; ``near`` puts devices that are well linked next to each
    other. Explicit ids put the named devices first and drop none; ValueError where one is not there.
    """
    if order.how == "fastest":
        return vendor.fastest(devices)
    if order.how == "pci":
        return by_pci(devices)
    if order.how == "free":
        return tuple(sorted(devices, key=_free, reverse=True))
    if order.how == "near":
        return by_nearness(devices)
    first = select(order.ids, devices, "--accel-order", _WORDS)
    return (*first, *(device for device in devices if device not in first))


def select(
    names: Sequence[str], devices: Sequence[Device], option: str, words: Sequence[str] = ()
) -> tuple[Device, ...]:
    """The devices that `names` name, in that order: by full id, unique start of one, or index into `devices`.

    ValueError, naming `option`, its other `words` and what is there, where a name fits no device, several, or one
    that was named before.
    """
    there = "allowed are " + "".join(f"{word}, " for word in words)
    there += ", ".join(f"{index} ({device.id})" for index, device in enumerate(devices)) or "no device: none is there"
    chosen: list[Device] = []
    for name in names:
        matches = [device for device in devices if device.id == name]
        if not matches and name.isdecimal():
            matches = list(devices[int(name) : int(name) + 1])
        elif not matches:
            matches = [device for device in devices if device.id.lower().startswith(name.lower())]
        if len(matches) != 1:
            what = "names several devices" if matches else "names no device"
            raise ValueError(f"{option}: {name!r} {what}; {there}")
        if matches[0] in chosen:
            raise ValueError(f"{option}: {name!r} names {matches[0].id} a second time; {there}")
        chosen += matches
    return tuple(chosen)


def by_pci(devices: Sequence[Device]) -> tuple[Device, ...]:
    """By PCI address; devices without one last, by the management library's number."""
    return tuple(sorted(devices, key=lambda device: (device.pci is None, device.pci or "", device.index)))


def by_figures(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Fastest first as far as the figures tell: capability, then cores times clock, then memory, then PCI order."""
    return tuple(
        sorted(
            by_pci(devices),
            key=lambda device: (device.capability or (), device.speed or 0.0, device.memory or 0),
            reverse=True,
        )
    )


def by_nearness(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Well linked devices next to each other: from the first in PCI order, always on to the one that is nearest.

    Nearest is what has most links to the device before it, then to all those before it (NVLink far above a common
    NUMA node), then what comes first in PCI order.
    """
    left = list(by_pci(devices))
    chain = left[:1]
    del left[:1]
    while left:
        nearest = max(left, key=lambda device: (linked(chain[-1], device), sum(linked(one, device) for one in chain)))
        left.remove(nearest)
        chain.append(nearest)
    return tuple(chain)


def _free(device: Device) -> int:
    return -1 if device.memory_free is None else device.memory_free
