"""The facts behind the health of an NVIDIA GPU, from the management library (NVML).

Every call is optional: older drivers and GPUs lack some, MIG forbids some, and so may the administrator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_accel.core.device import Device
from pytest_accel.hardware.health import ComputeMode, Facts, Process


def driver_installed() -> bool:
    """Whether the management library can be loaded."""
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
    """None where this driver or GPU does not have the figure, or does not tell it to this user."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def condition(nvml: Any, handle: Any) -> Facts:
    """The facts of a card, without its processes.

    Errors are counted since the driver was loaded (NVML's volatile count), for the count of the card's lifetime never
    goes down again, though the memory in question is long out of use. Rows that wait to be remapped do not count:
    "a pending remapping won't affect future work on the GPU" (NVML reference, nvmlDeviceGetRemappedRows).
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
    """The facts of a device with its processes; of one that has gone since, none.

    NVML lists processes with a compute context; a desktop that only draws is none. In a container the driver may list
    nothing, or pids that mean nothing there (unverified: it hangs on the driver's version and on how it was started).
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
    # Older drivers know the second version alone, with the same fields (since which one is unverified).
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
