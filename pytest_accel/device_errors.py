"""Errors of a device that stay: a test has left the device unusable for the process in which the test ran.

Under xdist the process is a worker. The worker ends after the test, and xdist starts another one in its place.
"""

from __future__ import annotations

import os
import pickle
import sys
from traceback import format_exc
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core import torch_api
from pytest_accel.core.stash_keys import DEVICE_ERROR

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession

_DEVICE_STATE = ("is_initialized", "device_count", "current_device", "memory_reserved", "synchronize")
"""The functions of torch's module for a type of devices that `_sticky_error` needs. `torch.cpu` lacks some."""


def record(item: pytest.Item) -> bool:
    """Return whether a device is unusable for this process after `item`; if so, add the error to the next report."""
    error = _sticky_error(sys.modules["torch"])
    if error is None:
        return False
    item.user_properties.append((DEVICE_ERROR, error))
    return True


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


def keeps_workers(config: pytest.Config) -> bool:
    """Return True if xdist would start no worker in place of one that has ended (``--max-worker-restart 0``)."""
    return str(getattr(config.option, "maxworkerrestart", None)) == "0"


def end_worker(item: pytest.Item, session: AccelSession) -> None:
    """End this xdist worker after `item`, whose reports have been sent; return only if xdist would not replace it.

    The fixtures that `item` has kept for later tests are torn down first. To the controller, the worker has crashed.
    `xdist_hooks.py` keeps it from reporting a crashed test.
    """
    if keeps_workers(item.config):
        return
    from pytest_accel.core.shims import finish_lost_worker, tear_down_after
    from pytest_accel.pool.pool_messages import EndAfterTest

    try:
        tear_down_after(item, None)
        end = EndAfterTest(item.session.items.index(item))
        item.config.workerinput["accel_channel"].send(pickle.dumps(end))  # type: ignore[attr-defined]
        finish_lost_worker(item.session)
    except Exception:
        session.pool_client.show(f"accel: the end of a worker failed after {item.nodeid}:\n{format_exc()}")
    finally:
        os._exit(1)
