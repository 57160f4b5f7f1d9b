"""Facts about NVIDIA GPUs from the management library (NVML): their health, their users and the links between them.

Every call may fail: older drivers and GPUs lack some, and MIG or the administrator may forbid some.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from pytest_accel.core.device import Device, Link
from pytest_accel.hardware.health import ComputeMode, Facts

_NVLINK_LIMIT = 36
_SWITCH = "switch"


def driver_installed() -> bool:
    """Return True if the management library can be loaded."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def optional(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML call, or None if the driver or GPU does not support it, or this user may not."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def condition(nvml: Any, handle: Any) -> Facts:
    """Return the facts about a card, without its processes."""
    # The errors since the driver was loaded: the count over the card's lifetime never goes down, even if the broken
    # memory is not used any more.
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    # Rows that wait to be remapped (rows[2]) do not count: "a pending remapping won't affect future work on the GPU"
    # (NVML reference, nvmlDeviceGetRemappedRows).
    rows = optional(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    return Facts(
        ecc_errors=optional(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile) or 0,
        retirement_pending=bool(optional(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)),
        remap_failed=bool(rows and rows[3]),
        compute_mode=_compute_mode(nvml, handle),
    )


def users(nvml: Any, device: Device) -> Facts:
    """Return the facts about a device with its processes; empty facts if the device has disappeared.

    NVML lists processes with a compute context, which a desktop that only draws does not have. In a container the
    driver may list nothing, or pids of another namespace (unverified: this depends on the driver's version and on how
    the container was started).
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device.id)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        # "The GPU has fallen off the bus or has otherwise become inaccessible" (nvml.h).
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            return Facts(lost=True)
        handle, memory = optional(nvml, nvml.nvmlDeviceGetHandleByUUID, device.id), None
        if handle is None:
            return Facts()
    card = optional(nvml, nvml.nvmlDeviceGetHandleByUUID, device.parent) if device.parent else handle
    facts = condition(nvml, card) if card is not None else Facts()
    # Older drivers have only the second version, with the same fields (which drivers is unverified).
    found = optional(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    if found is None:
        found = optional(nvml, nvml.nvmlDeviceGetComputeRunningProcesses_v2, handle)
    return replace(
        facts,
        processes={one.pid: one.usedGpuMemory for one in found or ()},
        memory_used=memory.used if memory else None,
        memory_free=memory.free if memory else None,
    )


def links(nvml: Any, cards: Sequence[tuple[Device, Any]]) -> dict[str, tuple[Link, ...]]:
    """Return the links of each card, by its id: first NVLinks, then PCIe links. `cards` have their NVML handles.

    If two cards are connected in both ways, both links are returned, since a test may ask for either.
    """
    nvlinks, pcie = _nvlinks(nvml, cards), _pcie(nvml, cards)
    return {card.id: (*nvlinks[card.id], *pcie[card.id]) for card, _ in cards}


def pci_address(info: Any) -> str | None:
    """Return the PCI address in the kernel's form; NVML's own text has eight digits for the domain."""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0" if info else None


def _compute_mode(nvml: Any, handle: Any) -> ComputeMode:
    modes: dict[int | None, ComputeMode] = {
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    }
    return modes.get(optional(nvml, nvml.nvmlDeviceGetComputeMode, handle), "default")


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
