"""A rank's devices in torch: verification, selection, limits, memory and waiting.

The functions import torch, so they are called in ranks only. The exception is `sticky_error`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_accel.core.device import MaskError

if TYPE_CHECKING:
    import torch

    from pytest_accel.rank.context import RankContext


_DEVICE_STATE = ("is_initialized", "device_count", "current_device", "memory_reserved", "synchronize")
"""The functions of torch's module for a type of devices that `sticky_error` needs. `torch.cpu` lacks some."""


def verify(context: RankContext) -> None:
    """Raise :class:`MaskError` if torch sees other devices than those that the rank has been given."""
    seen = context.visible_devices
    try:
        context.vendor.verify(seen, os.environ)
    except (AssertionError, ImportError, OSError, RuntimeError) as error:  # The errors that torch raises.
        names = ", ".join(device.id for device in seen)
        raise MaskError(
            f"the process has been given {names}, which torch cannot use: {type(error).__name__}: {error}"
        ) from error


def select(context: RankContext) -> torch.device:
    """Make the first device of this rank torch's current device, and return it."""
    import torch

    device = torch.device(context.torch_device)
    # Not every module has set_device: mps has only one device.
    if set_device := getattr(_module_of(context.torch_device), "set_device", None):
        set_device(device)
    return device


def limit_threads() -> None:
    """Set torch's number of threads to ``OMP_NUM_THREADS``, which libgomp read before this process was forked."""
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))


def limit_memory(context: RankContext) -> None:
    """Limit this rank's memory on each of its devices to its share, for the types of devices for which torch can."""
    import torch

    for device in context.own_devices:
        name = torch.device(context.torch_name(device))
        limit = getattr(_module_of(str(name)), "set_per_process_memory_fraction", None)
        if limit is not None:
            fraction = context.fraction(device)
            # mps has only one device, so its function does not take a device.
            limit(fraction) if name.type == "mps" else limit(fraction, name)


def torch_devices(names: Sequence[str]) -> list[torch.device]:
    """Return the `torch.device` for each name."""
    import torch

    return [torch.device(name) for name in names]


def allocated_memory(context: RankContext) -> dict[str, int]:
    """Return the bytes that torch has allocated on each of this rank's devices, by torch's name of the device.

    Devices for which torch does not count are left out.
    """
    sizes = {}
    for device in context.own_devices:
        name = context.torch_name(device)
        module = _memory_of(name)
        if hasattr(module, "memory_allocated"):
            sizes[name] = int(module.memory_allocated(name))
    return sizes


def wait_for_devices(context: RankContext) -> None:
    """Wait for all work on this rank's devices; raise RuntimeError if some of it has failed.

    The next call that waits for a device raises an error of earlier work, such as an index out of bounds in a kernel.
    Without this wait, that call may be in another test.
    """
    __tracebackhide__ = True
    for device in context.own_devices:
        name = context.torch_name(device)
        if name.startswith("cpu"):
            return
        module = _module_of(name)
        # Do not initialise a runtime that the test has not used.
        if getattr(module, "is_initialized", lambda: True)() and hasattr(module, "synchronize"):
            error = _failed_work(module, name)
            if error is not None:
                raise RuntimeError(f"work that the test started on {name} has failed: {error}")


def _failed_work(module: Any, name: str) -> RuntimeError | None:
    """Wait for all work on the device `name` of torch's `module`; return the error of work that has failed, or None."""
    try:
        # mps has only one device, so its function takes no argument.
        module.synchronize() if name == "mps" else module.synchronize(name)
    except RuntimeError as error:
        return error
    return None


def sticky_error(torch: Any) -> str | None:
    """Return the name of a device and the error that its use in this process always raises now; None if none does.

    `torch` is the module that the process has imported; the process need not be a rank. Only devices that the process
    has used are checked. A kernel that fails, for example by an assertion or an illegal access to memory, leaves such
    an error in CUDA.
    """
    accelerator = getattr(torch, "accelerator", None)  # Since torch 2.6.
    current = None if accelerator is None else accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else getattr(current, "type", "cpu")
    module: Any = getattr(torch, kind, None)
    if any(not hasattr(module, name) for name in _DEVICE_STATE) or not module.is_initialized():
        return None
    for index in range(module.device_count()):
        # Waiting for a device that the process has not used would allocate memory on the device.
        if index == module.current_device() or module.memory_reserved(index):
            name = f"{kind}:{index}"
            # The first wait clears an error that is not sticky.
            if _failed_work(module, name) is not None and (error := _failed_work(module, name)) is not None:
                return f"{name}: {str(error).strip().partition(chr(10))[0]}"
    return None


def reset_peak_memory(device: str) -> None:
    """Start measuring the peak of the allocated memory on `device`."""
    module = _memory_of(device)
    if module is not None and hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def peak_memory(device: str) -> int | None:
    """Return the peak of the bytes allocated by torch on `device` in the test; None if torch does not count them."""
    module = _memory_of(device)
    if module is None or not hasattr(module, "max_memory_allocated"):
        return None
    return int(module.max_memory_allocated(device))


def _memory_of(device: str) -> Any:
    """Return torch's module that counts the memory of a device; None for the CPU, and if torch has no such module."""
    if device.startswith("cpu"):
        return None
    return _module_of(device)


def _module_of(device: str) -> Any:
    """Return torch's module for a device, such as `torch.cuda`; None if it has none (xla)."""
    import torch

    return getattr(torch, torch.device(device).type, None)
