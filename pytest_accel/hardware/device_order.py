"""The order in which a session uses its devices (``--accel-order``), and which devices should be used together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from pytest_accel.core.device import Device, Near, Vendor

WORDS = ("fastest", "pci", "free", "near")
"""The values of ``--accel-order`` that name no devices."""
_LINK_WEIGHTS: dict[Near, float] = {"nvlink": 1000.0, "pcie": 1.0, "numa": 1.0}
"""Weights of links: an NVLink counts far more than a common PCIe switch or NUMA node."""
_SAME_MODEL_WEIGHT = 1e6
"""Weight of equal models. Ranks on unlike devices wait for the slower one, and a model may not fit on both."""
_NEAR_WEIGHT = 1e9
"""Weight of a link that the test asks for, which has precedence over everything else."""


def parse_names(text: str) -> tuple[str, ...]:
    """Return the entries of ``ID,ID…``: ids, starts of ids, or indices; raise ValueError if one of them is none."""
    names = tuple(entry.strip() for entry in text.split(","))
    # An entry of letters only is a misspelt word. On a machine without devices, no other check would report it.
    if not all(names) or any(map(str.isalpha, names)):
        raise ValueError(text)
    return names


def apply_order(order: str, devices: Sequence[Device], vendor: Vendor) -> tuple[Device, ...]:
    """Return all `devices` in `order`, a value of ``--accel-order``.

    ``free`` sorts by the memory that was free at discovery; ``near`` puts well-linked devices next to each other.
    Explicit ids put the named devices first and keep the others; raise ValueError if a named device does not exist.
    """
    if order == "fastest":
        return vendor.fastest(devices)
    if order == "pci":
        return by_pci(devices)
    if order == "free":
        return tuple(sorted(devices, key=lambda device: device.memory_free or -1, reverse=True))
    if order == "near":
        return by_nearness(devices)
    first = select(parse_names(order), devices, "--accel-order")
    return (*first, *(device for device in devices if device not in first))


def select(names: Sequence[str], devices: Sequence[Device], option: str) -> tuple[Device, ...]:
    """Return the devices in `names`, in that order.

    A name is an id, the unique start of an id, or an index in `devices`. Raise ValueError, with `option` and the
    devices, if a name matches no device, several devices, or a device that another name has selected.
    """
    there = ", ".join(f"{index} ({device.id})" for index, device in enumerate(devices))
    allowed = f"allowed are {there or 'no device: none is there'}"
    chosen: list[Device] = []
    for name in names:
        matches = [device for device in devices if device.id == name]
        if not matches and name.isdecimal():
            matches = list(devices[int(name) : int(name) + 1])
        elif not matches:
            matches = [device for device in devices if device.id.lower().startswith(name.lower())]
        if len(matches) != 1:
            problem = "names several devices" if matches else "names no device"
            raise ValueError(f"{option}: {name!r} {problem}; {allowed}")
        if matches[0] in chosen:
            raise ValueError(f"{option}: {name!r} names {matches[0].id} a second time; {allowed}")
        chosen += matches
    return tuple(chosen)


def by_pci(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return `devices` by PCI address, then devices without an address by the management library's number."""
    return tuple(sorted(devices, key=lambda device: (device.pci is None, device.pci or "", device.index)))


def by_figures(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return `devices`, presumably fastest first: by capability, cores times clock, memory, then PCI order."""
    return tuple(
        sorted(
            by_pci(devices),
            key=lambda device: (device.capability or (), device.speed or 0.0, device.memory or 0),
            reverse=True,
        )
    )


def by_nearness(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return `devices` in a chain that puts well-linked devices next to each other.

    The chain starts with the first device in PCI order, and the nearest remaining device is appended each time: the
    device most closely linked to the last device of the chain, then to all its devices, then the first in PCI order.
    """
    rest = list(by_pci(devices))
    chain = rest[:1]
    del rest[:1]
    while rest:
        nearest = max(rest, key=lambda device: (linked(chain[-1], device), sum(linked(one, device) for one in chain)))
        rest.remove(nearest)
        chain.append(nearest)
    return tuple(chain)


def linked(one: Device, other: Device) -> float:
    """Return how close two devices are: the sum of the weights of their links."""
    return sum(_LINK_WEIGHTS[via] for via in _links(one, other))


def _links(one: Device, other: Device) -> list[Near]:
    """Return the kinds of the links between two devices. A common NUMA node is a link."""
    found: list[Near] = [link.via for link in one.links if link.peer == other.id]
    if one.numa is not None and one.numa == other.numa:
        found.append("numa")
    return found


def ties(devices: Sequence[Device], near: Near | None) -> tuple[tuple[str, str, float], ...]:
    """Return a weight for each pair of devices: the links that `near` asks for, then equal models, then all links.

    Return none if all pairs have the same weight, so that only the session's order decides.
    """

    def weight(one: Device, other: Device) -> float:
        same_model = (one.name, one.memory, one.capability) == (other.name, other.memory, other.capability)
        preferred = _SAME_MODEL_WEIGHT * same_model + _NEAR_WEIGHT * (near in _links(one, other))
        return linked(one, other) + preferred

    found = tuple((one.id, other.id, weight(one, other)) for one, other in combinations(devices, 2))
    return found if len({value for _, _, value in found}) > 1 else ()
