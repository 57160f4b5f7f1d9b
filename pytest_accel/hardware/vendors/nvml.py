"""Facts about NVIDIA GPUs from the management library (NVML): their health, their users and the links between them.

Every call may fail: older drivers and GPUs lack some, and MIG or the administrator may forbid some.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from pytest_accel.core.device import Device, Link, Near
from pytest_accel.hardware.health import ComputeMode, Facts


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
    modes: dict[int, ComputeMode] = {
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    }
    return Facts(
        ecc_errors=optional(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile) or 0,
        retirement_pending=bool(optional(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)),
        remap_failed=bool(rows and rows[3]),
        compute_mode=modes.get(optional(nvml, nvml.nvmlDeviceGetComputeMode, handle), "default"),
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
    found = optional(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return replace(
        facts,
        processes={one.pid: one.usedGpuMemory for one in found or ()},
        memory_used=memory.used if memory else None,
        memory_free=memory.free if memory else None,
    )


def links(nvml: Any, cards: Sequence[tuple[Device, Any]]) -> dict[str, tuple[Link, ...]]:
    """Return the links of each card, by its id. `cards` have their NVML handles.

    Direct NVLinks are counted: a GPU may have one to a peer, and two to another. Links by PCIe do without the host: of
    NVML's levels (nvml.h, nvmlGpuTopologyLevel_t) these are INTERNAL ("e.g. Tesla K80"), SINGLE ("all devices that only
    need traverse a single PCIe switch") and MULTIPLE ("all devices that need not traverse a host bridge"). If two cards
    are connected in both ways, both links are returned, since a test may ask for either.
    """
    near = (nvml.NVML_TOPOLOGY_INTERNAL, nvml.NVML_TOPOLOGY_SINGLE, nvml.NVML_TOPOLOGY_MULTIPLE)
    found: dict[str, tuple[Link, ...]] = {card.id: () for card, _ in cards}
    for (one, handle), (other, peer) in combinations(cards, 2):
        vias: list[Near] = []
        nvlink = optional(nvml, nvml.nvmlDeviceGetP2PStatus, handle, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if nvlink == nvml.NVML_P2P_STATUS_OK:
            lanes = range(nvml.NVML_NVLINK_MAX_LINKS)
            ends = [optional(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, lane) for lane in lanes]
            vias += ["nvlink"] * max(1, sum(pci_address(end) == other.pci for end in ends))
        if optional(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handle, peer) in near:
            vias.append("pcie")
        found[one.id] += tuple(Link(other.id, via) for via in vias)
        found[other.id] += tuple(Link(one.id, via) for via in vias)
    return found


def pci_address(info: Any) -> str | None:
    """Return the PCI address in the kernel's form; NVML's own text has eight digits for the domain."""
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0" if info else None
