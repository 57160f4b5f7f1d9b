"""Which devices go well together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from pytest_accel.core.device import Device, Near

_VIA: dict[Near, float] = {"nvlink": 1000.0, "pcie": 1.0, "numa": 1.0}
_ALIKE = 1e6
"""Ranks on unlike devices wait for the slower one, and a model that fits the one may not fit the other."""
_NEAR = 1e9
"""What a test says itself stands above all."""


def linked(one: Device, other: Device) -> float:
    """How close two devices are: NVLinks count far above a PCIe switch or a NUMA node that they share."""
    return sum(_VIA[link.via] for link in one.links if link.peer == other.id) + (_VIA["numa"] * _share_node(one, other))


def ties(devices: Sequence[Device], near: Near | None) -> tuple[tuple[str, str, float], ...]:
    """How well each pair goes together: first the links that `near` asks for, then like models, then all links.

    Nothing where all pairs are equal, so that the session's order decides alone.
    """
    found = tuple(
        (one.id, other.id, linked(one, other) + _ALIKE * _alike(one, other) + _NEAR * _near(one, other, near))
        for one, other in combinations(devices, 2)
    )
    return found if len({weight for _, _, weight in found}) > 1 else ()


def _alike(one: Device, other: Device) -> bool:
    return (one.name, one.memory, one.capability) == (other.name, other.memory, other.capability)


def _share_node(one: Device, other: Device) -> bool:
    return one.numa is not None and one.numa == other.numa


def _near(one: Device, other: Device, near: Near | None) -> bool:
    if near == "numa":
        return _share_node(one, other)
    return near is not None and any(link.peer == other.id and link.via == near for link in one.links)
