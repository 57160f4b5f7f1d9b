"""Faults that are injected before collectives and messages of a rank, and random delays. Runs in ranks only.

The injector sees them at torch's dispatcher, through a `TorchDispatchMode` (`torch_api.watch_operations`), as torch's
own `CommDebugMode` does. Each function of `torch.distributed` passes there, and so do the collectives of code in C++:
those of DistributedDataParallel, of FSDP, of DTensor, of functional collectives and of compiled code. Methods of the
process group that are replaced (`rank/pending_work.py`) would miss these. A mode belongs to one thread: operations of
other threads are not seen, except those of autograd, which takes the modes along.

The driver knows which faults have not come, and fails the test for them (`verdict/judgement.py`). The rank could not do
so if it has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from threading import get_ident
from time import sleep
from typing import TYPE_CHECKING, Any

from pytest_accel.core import torch_api
from pytest_accel.settings.options import jitter

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

_LONGEST_DELAY = 0.02
"""Seconds of the longest random delay: much longer than a collective, and tests with hundreds of them still end."""
_OPERATIONS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"), "all_reduce"),
    **dict.fromkeys(("allgather", "allgather_coalesced"), "all_gather"),
    **dict.fromkeys(("allgather_base", "allgather_into_tensor_coalesced"), "all_gather_into_tensor"),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), "all_gather_into_tensor"),
    **dict.fromkeys(("all_gather_into_tensor_out", "all_gather_single"), "all_gather_into_tensor"),
    "reduce_scatter": "reduce_scatter",
    **dict.fromkeys(("reduce_scatter_base", "reduce_scatter_single"), "reduce_scatter_tensor"),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), "reduce_scatter_tensor"),
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), "all_to_all_single"),
    **dict.fromkeys(("send", "isend"), "send"),
    **dict.fromkeys(("recv", "recv_any_source", "irecv"), "recv"),
    **{name: name for name in ("broadcast", "reduce", "gather", "gather_into_tensor", "scatter")},
    **{name: name for name in ("barrier", "monitored_barrier")},
}
"""The function of `torch.distributed` for each operation of torch's dispatcher, without underscores around its name."""
_FUNCTIONS = frozenset(_OPERATIONS.values())
_OTHER_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "isend": "send",
    "irecv": "recv",
}
"""Functions whose operations have another function's name: those that torch 2.13 has renamed, and messages."""


class Fault:
    """A fault that happens on this rank before one operation, or before each."""

    def __init__(self, what: str, at: str | None, number: int | None, act: Callable[[], None]) -> None:
        """`what` describes it for messages (``delay``); `at` and `number` are arguments of the test.

        Raise ValueError if there is no function `at` (None: any), or `number` is not a number of calls (None: each).
        """
        __tracebackhide__ = True
        self.what = what
        self.at = None if at is None else _OTHER_NAMES.get(at, at)
        self.number = number
        self.act = act
        self.calls = 0
        """Number of calls since the fault was planned."""
        if self.at is not None and self.at not in _FUNCTIONS:
            raise ValueError(f"at must be one of {', '.join(sorted(_FUNCTIONS))}, or None for any, got {at!r}")
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"n must be an int >= 1, or None for each call, got {number!r}")

    @property
    def has_come(self) -> bool:
        return self.calls >= (self.number or 1)

    def __str__(self) -> str:
        # Not "all_reduce #3": reports call the third collective of a group so, also if the others were no all_reduce.
        function = self.at or "any operation"
        before = function if self.number is None else f"call {self.number} of {function}"
        times = "called once" if self.calls == 1 else f"called {self.calls} times" if self.calls else "never called"
        return f"{self.what} before {before} ({times})"


class Injector:
    """Injects the faults of one test into its call on this rank. A context manager for the call."""

    def __init__(self, context: RankContext) -> None:
        self.test = context.tests
        """The number of the test in this rank."""
        self._context = context
        self._seed = jitter(context.config)
        """The seed of random delays; None: there are none."""
        # The delays of a test do not depend on the tests before it: its rerun alone has the same.
        self._random = Random(f"{self._seed}/{context.rank}")
        self._faults: list[Fault] = []
        self._mode: Any = None
        self._thread: int | None = None
        """The thread that runs the call; None before and after the call."""

    def __enter__(self) -> None:
        self._thread = get_ident()
        self._faults.clear()  # A plugin may run the test again.
        if "torch" in sys.modules:
            self._watch()  # Modes must end in the reverse order, and the test may plan faults in another one.

    def __exit__(self, *error: object) -> None:
        self._thread = None
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)

    def check(self) -> None:
        """Raise RuntimeError unless the thread that runs the test's own code has called this."""
        __tracebackhide__ = True
        if self._thread != get_ident():
            raise RuntimeError(
                "faults can be planned only by the test's own code, in its own thread, and if the test has the "
                "argument 'faults'"
            )

    def plan(self, fault: Fault) -> None:
        """Let `fault` happen on this rank. Call `check` before."""
        self._faults.append(fault)
        self._context.announce((), self.missing)
        self._watch()

    @property
    def missing(self) -> list[str]:
        """Descriptions of the planned faults that have not come."""
        return [str(fault) for fault in self._faults if not fault.has_come]

    def _watch(self) -> None:
        """Watch the operations from now on, until the end of the call."""
        if self._mode is None:
            self._mode = torch_api.watch_operations(self._before)
            self._mode.__enter__()

    def _before(self, operation: str) -> None:
        __tracebackhide__ = True
        name = _OPERATIONS.get(operation.strip("_"))
        if name is None:  # For example, the wait for a collective.
            return
        if self._seed is not None:
            sleep(self._random.uniform(0, _LONGEST_DELAY))
        concerned = [fault for fault in self._faults if fault.at in (None, name)]
        is_news = not all(fault.has_come for fault in concerned)
        for fault in concerned:
            fault.calls += 1
        if is_news:  # Before the fault, which may kill this process.
            self._context.announce((), self.missing)
        for fault in concerned:
            if fault.number in (None, fault.calls):
                fault.act()
