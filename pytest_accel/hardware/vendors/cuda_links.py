"""Direct connections between NVIDIA GPUs, from the management library (NVML)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from pytest_accel.core.device import Device, Link
from pytest_accel.hardware.vendors.cuda_health import optional

_NVLINK_LIMIT = 36
_SWITCH = "switch"


def links(nvml: Any, cards: Sequence[tuple[Device, Any]]) -> dict[str, tuple[Link, ...]]:
    """Return the links of each card, by its id: first NVLinks, then PCIe links. `cards` have their NVML handles.

    If two cards are connected in both ways, both links are returned, since a test may ask for either.
    """
    nvlinks, pcie = _nvlinks(nvml, cards), _pcie(nvml, cards)
    return {card.id: (*nvlinks[card.id], *pcie[card.id]) for card, _ in cards}


def pci_address(info: Any) -> str | None:
    """Return the PCI address in the kernel's form; NVML's own text has eight digits for the domain."""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0" if info else None


def _nvlinks(nvml: Any, cards: Sequence[tuple[Device, Any]]) -> dict[str, tuple[Link, ...]]:
    """Return a link for each NVLink; all cards on an NVSwitch are linked to each other."""
    ids: dict[str | None, str] = {card.pci: card.id for card, _ in cards if card.pci}
    peers: dict[str, list[str]] = {}
    for card, handle in cards:
        peers[card.id] = found = []
        for link in range(_NVLINK_LIMIT):
            if not optional(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link):
                continue
            remote = optional(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            if remote == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                found.append(_SWITCH)
                break
            peer = ids.get(pci_address(optional(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)))
            if peer:
                found.append(peer)
    switched = [name for name, found in peers.items() if _SWITCH in found]
    return {
        name: tuple(
            Link(peer, "nvlink") for peer in ([one for one in switched if one != name] if name in switched else found)
        )
        for name, found in peers.items()
    }


def _pcie(nvml: Any, cards: Sequence[tuple[Device, Any]]) -> dict[str, tuple[Link, ...]]:
    """Return links between cards that are connected without the host: on the same board, or by PCIe switches alone.

    Of NVML's levels (nvml.h, nvmlGpuTopologyLevel_t) these are INTERNAL ("e.g. Tesla K80"), SINGLE ("all devices that
    only need traverse a single PCIe switch") and MULTIPLE ("all devices that need not traverse a host bridge").
    """
    near = (nvml.NVML_TOPOLOGY_INTERNAL, nvml.NVML_TOPOLOGY_SINGLE, nvml.NVML_TOPOLOGY_MULTIPLE)
    peers: dict[str, tuple[Link, ...]] = {card.id: () for card, _ in cards}
    for (one, handle), (other, other_handle) in combinations(cards, 2):
        if optional(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, other_handle) in near:
            peers[one.id] += (Link(other.id, "pcie"),)
            peers[other.id] += (Link(one.id, "pcie"),)
    return peers
