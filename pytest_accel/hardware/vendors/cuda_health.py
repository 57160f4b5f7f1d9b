"""Facts from which the health of an NVIDIA GPU is judged, from the management library (NVML).

Every call may fail: older drivers and GPUs lack some, and MIG or the administrator may forbid some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_accel.core.device import Device
from pytest_accel.hardware.health import ComputeMode, Facts, Process


def driver_installed() -> bool:
    """Return True if the management library can be loaded."""
    import ctypes
    import sys

    if sys.platform == "win32":
        return True
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
    """Return the facts about a card, without its processes.

    Errors are counted since the driver was loaded (NVML's volatile count), because the count over the card's lifetime
    never goes down, even if the broken memory is not used any more. Rows that wait to be remapped do not count: "a
    pending remapping won't affect future work on the GPU" (NVML reference, nvmlDeviceGetRemappedRows).
    """
    uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
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
        processes=tuple(Process(one.pid, one.usedGpuMemory) for one in found or ()),
        memory_used=memory.used if memory else None,
        memory_free=memory.free if memory else None,
    )


def _compute_mode(nvml: Any, handle: Any) -> ComputeMode:
    modes: dict[int | None, ComputeMode] = {
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    }
    return modes.get(optional(nvml, nvml.nvmlDeviceGetComputeMode, handle), "default")
