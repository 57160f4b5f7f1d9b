"""Tests without the plugin's marks that do not run as their authors think: findings of the hooks in `plugin.py`.

Such a test was marked too late, has a mark of the project with the name of a mark of the plugin, or has left a device
unusable for later tests in its process. Imported when a session has such a test, or has imported torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from pytest_accel.compat import torch_api
from pytest_accel.core.marks import MarkOwners, Marks, closest_marks, mark_text
from pytest_accel.verdict import phase_verdict

_PAGE = "docs/how-to/adopt-a-suite.md#a-mark-of-your-own"
_DEVICE_STATE = ("is_initialized", "device_count", "current_device", "memory_reserved", "synchronize")
"""The functions of torch's module for a type of devices that `device_error` needs. `torch.cpu` lacks some."""


# Marks that have changed since the collection


def fail_changed(item: pytest.Item, planned: Marks, present: Marks) -> None:
    """Raise an error, since `item` was `planned` for other marks than those that are `present`."""
    path, line, _ = item.location
    before, now = (", ".join(mark_text(one) for one in marks if one is not None) for marks in (planned, present))
    raise phase_verdict.not_run(
        f"{path}:{(line or 0) + 1}: the test had {before or 'no mark'} at its collection, and now has "
        f"{now or 'no mark'}; change marks in pytest_collection_modifyitems at the latest"
    )


# Marks of the project


def header_line(names: Iterable[str]) -> str:
    """Return the line of the session's header on marks that the project has registered."""
    shown = " and ".join(f"`{name}`" for name in sorted(names))
    return (
        f"accel: this project registers marks of its own, {shown}: tests with them are left alone; "
        f"`accel_marks = own` hands them over: {_PAGE}"
    )


def about_marks(item: pytest.Item, owners: MarkOwners) -> str | None:
    """Return a sentence on a mark of the project that `item` has; None if it has none."""
    found = [mark.name for mark in closest_marks(item) if mark is not None and not owners.is_ours(mark)]
    if not found:
        return None
    return (
        f"the mark `{found[-1]}` of this test is the project's own, so pytest-accel ran it without ranks and devices: "
        "`accel_marks = own` hands it over"
    )


# Unusable devices


def device_error(torch: Any) -> str:
    """Return the name of a device and the error that its use in this process always raises now; empty if none does.

    `torch` is the module that the process has imported; the process need not be a rank. Only devices that the process
    has used are checked. A kernel that fails, for example by an assertion or an illegal access to memory, leaves such
    an error in CUDA.
    """
    kind = torch_api.accelerator_type(torch) or "cpu"
    module: Any = getattr(torch, kind, None)
    if any(not hasattr(module, name) for name in _DEVICE_STATE) or not module.is_initialized():
        return ""
    for index in range(module.device_count()):
        # Waiting for a device that the process has not used would allocate memory on the device.
        if index == module.current_device() or module.memory_reserved(index):
            name = f"{kind}:{index}"
            # The first wait clears an error that is not sticky.
            if _error_of(module, name) and (error := _error_of(module, name)):
                return f"{name}: {error}"
    return ""


def _error_of(module: Any, name: str) -> str:
    """Wait for all work on the device `name` of torch's `module`; return the first line of the error, or ""."""
    try:
        module.synchronize(name)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""
