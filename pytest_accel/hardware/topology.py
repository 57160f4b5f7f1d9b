"""Weights that tell which devices should be used together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from pytest_accel.core.device import Device, Near

_LINK_WEIGHTS: dict[Near, float] = {"nvlink": 1000.0, "pcie": 1.0, "numa": 1.0}
_SAME_MODEL_WEIGHT = 1e6
"""Weight of equal models. Ranks on unlike devices wait for the slower one, and a model may not fit on both."""
_NEAR_WEIGHT = 1e9
"""Weight of a link that the test asks for, which has precedence over everything else."""


def linked(one: Device, other: Device) -> float:
    """Return how close two devices are. NVLinks count far more than a common PCIe switch or NUMA node."""
    links = sum(_LINK_WEIGHTS[link.via] for link in one.links if link.peer == other.id)
    return links + _LINK_WEIGHTS["numa"] * _same_numa_node(one, other)


def ties(devices: Sequence[Device], near: Near | None) -> tuple[tuple[str, str, float], ...]:
    """Return a weight for each pair of devices: the links that `near` asks for, then equal models, then all links.

    Empty if all pairs have the same weight, so that only the session's order decides.
    """

    def weight(one: Device, other: Device) -> float:
        preferred = _SAME_MODEL_WEIGHT * _same_model(one, other) + _NEAR_WEIGHT * _has_link(one, other, near)
        return linked(one, other) + preferred

    found = tuple((one.id, other.id, weight(one, other)) for one, other in combinations(devices, 2))
    return found if len({value for _, _, value in found}) > 1 else ()


def _same_model(one: Device, other: Device) -> bool:
    return (one.name, one.memory, one.capability) == (other.name, other.memory, other.capability)


def _same_numa_node(one: Device, other: Device) -> bool:
    return one.numa is not None and one.numa == other.numa


def _has_link(one: Device, other: Device, near: Near | None) -> bool:
    if near == "numa":
        return _same_numa_node(one, other)
    return near is not None and any(link.peer == other.id and link.via == near for link in one.links)
