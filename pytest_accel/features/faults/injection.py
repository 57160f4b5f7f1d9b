"""Faults that are injected before collectives and messages of a rank. Runs in ranks only.

A `TorchDispatchMode` (`torch_api.watch_operations`) sees operations at torch's dispatcher, as torch's own
`CommDebugMode` does. Each function of `torch.distributed` passes there, and so do the collectives of code in C++: of
DistributedDataParallel, FSDP, DTensor, functional collectives and compiled code. Replaced methods of the process group
(`rank/operations.py`) would miss these. A mode belongs to one thread: it does not see operations of other threads,
except autograd's, which takes the modes along.

The driver fails the test for faults that have not come (`verdict/judgement.py`): their rank may have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from pytest_accel.compat import torch_api

_OPERATIONS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("all_gather", "allgather", "allgather_coalesced"), "all_gather"),
    **dict.fromkeys(("allgather_base", "allgather_into_tensor_coalesced"), "all_gather_into_tensor"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), "all_gather_into_tensor"),
    **dict.fromkeys(("all_gather_into_tensor_out", "all_gather_single"), "all_gather_into_tensor"),
    "reduce_scatter": "reduce_scatter",
    **dict.fromkeys(("reduce_scatter_base", "reduce_scatter_single"), "reduce_scatter_tensor"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), "reduce_scatter_tensor"),
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    **dict.fromkeys(("all_to_all", "alltoall"), "all_to_all"),
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "all_to_all_single"),
    **dict.fromkeys(("send", "isend"), "send"),
    **dict.fromkeys(("recv", "recv_any_source", "irecv"), "recv"),
    **{name: name for name in ("broadcast", "reduce", "gather", "gather_into_tensor", "scatter")},
    **{name: name for name in ("barrier", "monitored_barrier")},
}
"""The function of `torch.distributed` for each operation of torch's dispatcher, without underscores around its name.

The functions themselves are keys, too, also those that the dispatcher sees under another function's name (``isend``),
and functions that torch 2.13 has renamed: a test may give each of these names.
"""


class Fault:
    """A fault that happens on this rank before one operation, or before each."""

    def __init__(self, what: str, at: str | None, number: int | None, act: Callable[[], object]) -> None:
        """`what` describes it for messages (``delay``); `at` and `number` are arguments of the test.

        Raise ValueError unless `at` is a function, or None for any, and `number` an int >= 1, or None for each call.
        """
        __tracebackhide__ = True
        if at is not None and at not in _OPERATIONS:
            functions = ", ".join(sorted(set(_OPERATIONS.values())))
            raise ValueError(f"at must be one of {functions}, or None for any, got {at!r}")
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"n must be an int >= 1, or None for each call, got {number!r}")
        self.what = what
        self.at = None if at is None else _OPERATIONS[at]
        self.number = number
        self.act = act
        self.calls = 0
        """Number of calls since the fault was planned."""

    @property
    def has_come(self) -> bool:
        return self.calls >= (self.number or 1)

    def __str__(self) -> str:
        # Not "all_reduce #3": in reports, this is the third collective of a group, whatever the first two were.
        function = self.at or "any operation"
        before = function if self.number is None else f"call {self.number} of {function}"
        times = "called once" if self.calls == 1 else f"called {self.calls} times" if self.calls else "never called"
        return f"{self.what} before {before} ({times})"


def watch(before: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Return a context manager in which `before` is called with the function of `torch.distributed` of each operation.

    The operation is not issued if `before` raises an error.
    """

    def before_operation(operation: str) -> None:
        __tracebackhide__ = True
        function = _OPERATIONS.get(operation.strip("_"))
        if function is not None:  # Others, such as waits, are no collective or message.
            before(function)

    watching: AbstractContextManager[Any] = torch_api.watch_operations(before_operation)
    return watching
