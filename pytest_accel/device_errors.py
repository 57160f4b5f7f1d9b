"""Errors of a device that stay: a test has left the device unusable for the process in which the test ran."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pytest_accel.compat import torch_api
from pytest_accel.core.stash_keys import DEVICE_ERROR

_DEVICE_STATE = ("is_initialized", "device_count", "current_device", "memory_reserved", "synchronize")
"""The functions of torch's module for a type of devices that `_sticky_error` needs. `torch.cpu` lacks some."""


def record(item: pytest.Item) -> str:
    """Return a sentence if a device is unusable for this process after `item`, and add the error to the next report."""
    error = _sticky_error(sys.modules["torch"])
    if error is None:
        return ""
    item.user_properties.append((DEVICE_ERROR, error))
    return f"{item.nodeid} has left a device unusable for this process: {error}"


def _sticky_error(torch: Any) -> str | None:
    """Return the name of a device and the error that its use in this process always raises now; None if none does.

    `torch` is the module that the process has imported; the process need not be a rank. Only devices that the process
    has used are checked. A kernel that fails, for example by an assertion or an illegal access to memory, leaves such
    an error in CUDA.
    """
    kind = torch_api.accelerator_type(torch) or "cpu"
    module: Any = getattr(torch, kind, None)
    if any(not hasattr(module, name) for name in _DEVICE_STATE) or not module.is_initialized():
        return None
    for index in range(module.device_count()):
        # Waiting for a device that the process has not used would allocate memory on the device.
        if index == module.current_device() or module.memory_reserved(index):
            name = f"{kind}:{index}"
            # The first wait clears an error that is not sticky.
            if _error_of(module, name) and (error := _error_of(module, name)):
                return f"{name}: {error}"
    return None


def _error_of(module: Any, name: str) -> str:
    """Wait for all work on the device `name` of torch's `module`; return the first line of the error, or ""."""
    try:
        module.synchronize(name)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
