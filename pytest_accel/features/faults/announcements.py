"""The methods of the fixture `faults`, which announce the ends of a test's ranks and plan faults. In ranks only."""

from __future__ import annotations

import math
import signal as signals
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from os import getpid, kill
from sys import modules
from time import sleep
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_accel.compat import torch_api
from pytest_accel.core.truncation import ranks_text
from pytest_accel.messages.rank_messages import UNEVEN_COLLECTIVES, Announced, ExpectedEnd
from pytest_accel.rank.process_group import Gathering
from pytest_accel.verdict.expected_ends import leave_nobody

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

_LARGEST_STATUS = 255


class Faults:
    """The value of the fixture `faults`: announces how ranks of the running test end on purpose.

    Every rank must make the same announcements, in the same order, in the test's own code and before the event. Each
    call returns when all ranks have made it. An announced end that does not come fails the test.

    A planned fault happens before a collective or message of the test: `at` is a function of `torch.distributed`
    (``"all_reduce"``, or None for any), and `n` the number of its call on that rank, from now on. Collectives of
    DistributedDataParallel, FSDP, DTensor and compiled code count, too. A `TorchDispatchMode` sees them at torch's
    dispatcher, in the test's own thread. A planned fault that does not happen fails the test, also if its rank
    has ended as announced.
    """

    def __init__(self, context: RankContext, modes: ExitStack) -> None:
        """Operations are seen as long as `modes` is open."""
        self._context = context
        self._test = context.tests
        self._modes = modes
        self._gather = Gathering(context, "announcement")  # By the world's store: it needs no process group.
        self._is_watching = False
        self._ends: tuple[ExpectedEnd, ...] = ()
        self._faults: list[Fault] = []
        self._fail_at_failed_checks()
        if "torch" in modules:
            self._watch()  # Modes must end in the reverse order: begin before the modes of the test.

    def expect_exit(self, rank: int, *, status: int | None = None, signal: str | int | None = None) -> None:
        """Announce that the process of `rank` exits with `status`, or that `signal` (``"SIGKILL"``) kills it."""
        __tracebackhide__ = True
        if (status is None) == (signal is None):
            raise ValueError("expect_exit needs either status= or signal=")
        if signal is not None:
            try:
                status = -(signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal))
            except (KeyError, ValueError):
                raise ValueError(f"there is no signal {signal!r}; name it as in 'SIGKILL'") from None
        elif type(status) is not int or not 0 <= status <= _LARGEST_STATUS:
            raise ValueError(f"status must be an int from 0 to {_LARGEST_STATUS}, got {status!r}")
        self._announce(ExpectedEnd(rank, status=status))

    def expect_hang(self, rank: int, *, after: float = 1.0) -> None:
        """Announce that `rank` does not finish the test: it is stopped `after` seconds after all others have."""
        __tracebackhide__ = True
        if not _is_duration(after) or after == 0:
            raise ValueError(f"after must be a finite number of seconds > 0, got {after!r}")
        self._announce(ExpectedEnd(rank, after=float(after)))

    def expect_device_error(self, rank: int | None = None, text: str = "") -> None:
        """Announce that the test fails on `rank` (on each if None) with an error of its device that contains `text`.

        The error may be raised in the test, or by work for which the test has not waited. The error is recognized by
        its class, which torch has since 2.8.
        """
        __tracebackhide__ = True
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {text!r}")
        ranks = range(self._context.spec.ranks) if rank is None else (rank,)
        self._announce(*(ExpectedEnd(one, text=text) for one in ranks))

    def expect_uneven_collectives(self) -> None:
        """Announce that the ranks issue different numbers of collectives in a process group."""
        __tracebackhide__ = True
        if self._context.spec.ranks == 1:
            raise ValueError("a test of one rank cannot issue different numbers of collectives")
        self._announce(UNEVEN_COLLECTIVES)

    def kill(self, rank: int, at: str | None = None, n: int = 1) -> None:
        """Plan that SIGKILL kills `rank`, and announce it as :meth:`expect_exit` does."""
        __tracebackhide__ = True
        fault = Fault("kill", at, n, lambda: kill(getpid(), signals.SIGKILL))
        self._plan(rank, fault, ExpectedEnd(rank, status=-signals.SIGKILL))

    def delay(self, rank: int, seconds: float, at: str | None = None, n: int | None = None) -> None:
        """Plan a delay of `seconds` on `rank`, before each call if `n` is None."""
        __tracebackhide__ = True
        if not _is_duration(seconds):
            raise ValueError(f"seconds must be a finite number >= 0, got {seconds!r}")
        self._plan(rank, Fault("delay", at, n, partial(sleep, seconds)))

    def fail(self, rank: int, error: BaseException, at: str | None = None, n: int = 1) -> None:
        """Plan that the call raises `error` on `rank`, in place of the collective or message."""
        __tracebackhide__ = True
        if not isinstance(error, BaseException):
            raise TypeError(f"error must be an exception, got {error!r}")
        self._plan(rank, Fault(f"fail with {type(error).__name__}", at, n, partial(_raise, error)))

    def _plan(self, rank: int, fault: Fault, *ends: ExpectedEnd) -> None:
        """Let `fault` happen on `rank`, and announce `ends`."""
        __tracebackhide__ = True
        self._check_rank(rank)
        self._announce(*ends, faults=[fault] if rank == self._context.rank else [])
        self._watch()

    def _announce(self, *ends: ExpectedEnd, faults: Sequence[Fault] = ()) -> None:
        """Tell the driver, which fails the test if the ranks' ends differ; then wait until all ranks have told it.

        Raise ValueError for ends that cannot be judged, and RuntimeError outside of the call of a test.
        """
        __tracebackhide__ = True
        context, known = self._context, {end.rank for end in self._ends}
        for end in ends:
            if end.rank is not None:
                self._check_rank(end.rank)
                if end.rank in known:
                    raise ValueError(f"the end of rank {end.rank} was announced before in this test")
        size = context.spec.ranks
        if leave_nobody((*self._ends, *ends), size):
            raise ValueError("the ends of all ranks would be announced; at least one rank must be left to report")
        if not context.in_call or context.tests != self._test:
            raise RuntimeError("ends can be announced, and faults planned, only in the first run of a test's own code")
        self._ends += ends
        self._faults += faults
        # Before the exchange: when that returns, the driver's connections have the announcements of all ranks.
        self._tell()
        if not ends or size == 1:
            return
        self._gather(b"")
        # Rank 0 serves the store: it must not end before the others have read the announcements.
        self._gather(b"") if context.rank == 0 else self._gather.put(b"")

    def _tell(self) -> None:
        """Tell the driver what is announced and planned."""
        missing = tuple(str(fault) for fault in self._faults if not fault.has_come)
        self._context.announce(Announced(ends=self._ends, missing_faults=missing))

    def _fail_at_failed_checks(self) -> None:
        """Have a failed check of pytest-check fail the test at once: the rank may end before it reports the check."""
        for name, module in list(modules.items()):
            if name.partition(".")[0] == "pytest_check" and hasattr(module, "log_failure"):
                log: Any = module.log_failure
                vars(module)["log_failure"] = partial(self._log_failed_check, log)
                self._modes.callback(setattr, module, "log_failure", log)

    def _log_failed_check(self, log: Callable[..., None], *args: object, **named: object) -> None:
        __tracebackhide__ = True
        log(*args, **named)
        if named.get("xfail") is None and self._context.in_call:
            pytest.fail("with the fixture 'faults', a failed check ends the test on its rank")

    def _check_rank(self, rank: object) -> None:
        """Raise ValueError if the test has no such rank."""
        __tracebackhide__ = True
        ranks = range(self._context.spec.ranks)
        if type(rank) is not int or rank not in ranks:
            raise ValueError(f"the test has no rank {rank!r}; its ranks are {ranks_text(ranks)}")

    def _watch(self) -> None:
        """See the operations of this thread from now on."""
        if not self._is_watching:
            self._is_watching = True
            self._modes.enter_context(watch(self._before))

    def _before(self, function: str) -> None:
        """Let the faults happen that are planned for this call of a `function` of `torch.distributed`."""
        __tracebackhide__ = True
        if not self._context.in_call:
            return
        concerned = [fault for fault in self._faults if fault.at in (None, function)]
        is_news = not all(fault.has_come for fault in concerned)
        for fault in concerned:
            fault.calls += 1
        if is_news:  # Before the fault, which may kill this process.
            self._tell()
        for fault in concerned:
            if fault.number in (None, fault.calls):
                fault.act()


def _is_duration(value: object) -> bool:
    """Return True for a finite number of seconds >= 0."""
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _raise(error: BaseException) -> NoReturn:
    __tracebackhide__ = True
    raise error


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
    """A fault that happens on this rank before one operation, or before each.

    The driver fails the test for a fault that has not come (`verdict/judgement.py`): the rank may have ended.
    """

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

    A `TorchDispatchMode` (`torch_api.watch_operations`) sees operations at torch's dispatcher, as torch's own
    `CommDebugMode` does. Each function of `torch.distributed` passes there, and so do the collectives of code in C++:
    of DistributedDataParallel, FSDP, DTensor, functional collectives and compiled code. Replaced methods of the process
    group (`rank/operations.py`) would miss these. A mode belongs to one thread: it does not see operations of other
    threads, except autograd's, which takes the modes along.
    """

    def before_operation(operation: str) -> None:
        __tracebackhide__ = True
        function = _OPERATIONS.get(operation.strip("_"))
        if function is not None:  # Others, such as waits, are no collective or message.
            before(function)

    watching: AbstractContextManager[Any] = torch_api.watch_operations(before_operation)
    return watching
