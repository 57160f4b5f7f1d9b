"""Memory of devices that tests use and leak, and that torch, libraries and failed tests keep. Runs in ranks only."""

from __future__ import annotations

import sys
from contextlib import suppress
from gc import collect
from typing import TYPE_CHECKING, Any

from pytest_accel.compat import torch_api
from pytest_accel.compat.pytest_shims import forget_failures
from pytest_accel.messages.rank_messages import Leak, LeakKind
from pytest_accel.rank import torch_devices

if TYPE_CHECKING:
    import pytest

    from pytest_accel.rank.context import RankContext

_TOLERANCE = 64 << 20
"""Bytes by which torch's allocated memory on a device may grow in a test without being a leak.

A test may leave constants and small caches of libraries behind. Their workspaces can be larger
(https://docs.nvidia.com/cuda/cublas/#cublassetworkspace): they are cleared before a test is said to leak memory. They
are not cleared at the beginning of a test, since that would cost time in every test: up to this number of bytes,
workspaces of earlier tests may hide a leak.
"""
_LAST_FAILURE = ("last_exc", "last_type", "last_value", "last_traceback")
"""The attributes of `sys` in which pytest keeps the exception of a failed test for a debugger."""


def grown_memory(context: RankContext, before: dict[str, int]) -> list[Leak]:
    """Return a leak for each device on which more memory is allocated than is tolerated since `before`."""
    # Tensors in reference cycles are no leak: the garbage collector would free them later.
    for release in (clear_workspaces, collect):
        if _grown(context, before):
            release()
    return [Leak(LeakKind.MEMORY, name, number=size, lasting=True) for name, size in _grown(context, before)]


def _grown(context: RankContext, before: dict[str, int]) -> list[tuple[str, int]]:
    sizes = [(name, size - before.get(name, 0)) for name, size in allocated_memory(context).items()]
    return [(name, size) for name, size in sizes if size > _TOLERANCE]


def forget_failure(context: RankContext, item: pytest.Item | None) -> None:
    """Release the exceptions that keep the frames of the failed test `item`, and so its tensors on devices, alive."""
    for name in _LAST_FAILURE:
        vars(sys).pop(name, None)
    if item is not None:
        forget_failures(item)
    if not context.torch_device.startswith("cpu"):
        collect()  # An exception that the test has stored in a variable is in a reference cycle with its traceback.


def clear_workspaces() -> None:
    """Free the workspaces of cuBLAS and cuBLASLt, or of their counterparts on ROCm; torch makes new ones when needed.

    Each handle has a workspace of up to 32 MiB for each stream, and threads, such as autograd's, have their own
    handles. torch counts workspaces as allocated, and its own leak check clears them with the same function.

    Other caches need no treatment. The caches of cuFFT's plans, NCCL's buffers and cuDNN's handles are not allocated by
    torch, which does not count them. Workspaces of cuDNN, cuFFT and Triton are freed after each call. The pools of CUDA
    graphs, also of Inductor's, belong to the compiled functions and graphs of the suite: while these live, their
    memory is needed, and afterwards it is free.
    """
    torch = sys.modules.get("torch")
    clear = torch_api.cublas_workspace_clearing(torch)
    # A graph that a wider fixture has captured uses the workspace of that time whenever it is replayed.
    if clear is not None and not _has_private_pools(torch):
        clear()


def _has_private_pools(torch: Any) -> bool:
    """Return whether memory pools of CUDA graphs exist, or may exist."""
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # The allocator cudaMallocAsync has no snapshots.
        return True
    return any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in segments)


def empty_cache(context: RankContext) -> None:
    """Return torch's cached memory to the devices of the rank.

    Call this when other processes may use the devices. From the cache, the next test gets its memory sooner.
    """
    for _, module in _modules(context, "empty_cache"):
        if torch_devices.is_initialized(module):
            with suppress(RuntimeError):  # For example, while the test captures a graph. The memory stays in the cache.
                module.empty_cache()


def allocated_memory(context: RankContext) -> dict[str, int]:
    """Return the bytes that torch has allocated on each of this rank's devices, by torch's name of the device.

    Devices for which torch does not count are left out.
    """
    return {name: int(module.memory_allocated(name)) for name, module in _modules(context, "memory_allocated")}


def reset_peak_memory(context: RankContext) -> None:
    """Start measuring the peak of the allocated memory on the rank's first device."""
    for name, module in _modules(context, "reset_peak_memory_stats")[:1]:
        module.reset_peak_memory_stats(name)


def peak_memory(context: RankContext) -> dict[str, int]:
    """Return the property of a test for the peak of the bytes that torch has allocated, if torch counts them."""
    peaks = [module.max_memory_allocated(name) for name, module in _modules(context, "max_memory_allocated")[:1]]
    return {"accel_peak_memory": int(peaks[0])} if peaks else {}


def _modules(context: RankContext, function: str) -> list[tuple[str, Any]]:
    """Return torch's names of the rank's devices, each with torch's module for it, if that has the `function`."""
    modules = [(name, torch_devices.module_of(name)) for name, _ in context.accelerators]
    return [(name, module) for name, module in modules if hasattr(module, function)]
