"""The methods of the fixture `faults`: how ranks of a test end is announced, and faults are planned. In ranks only."""

from __future__ import annotations

import math
import signal as signals
from functools import partial
from os import getpid, kill
from time import sleep
from typing import TYPE_CHECKING, NoReturn

from msgspec import json

from pytest_accel.core.rank_messages import EndKind, ExpectedEnd
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.faults.injection import Fault
from pytest_accel.verdict.expected_ends import leave_nobody
from pytest_accel.verdict.sentences import announcement

if TYPE_CHECKING:
    from pytest_accel.features.faults.injection import Injector
    from pytest_accel.rank.context import RankContext

_LARGEST_STATUS = 255


class Faults:
    """The value of the fixture `faults`: announces how ranks of the running test end on purpose.

    Every rank must make the same announcements, in the same order, in the test's own code and before the event. Each
    call returns when all ranks have made it. An announced end that does not come fails the test.

    A planned fault happens before a collective or message of the test: `at` is a function of `torch.distributed`
    (``"all_reduce"``; None: any), and `n` the number of its call on that rank, from now on. Collectives of
    DistributedDataParallel, FSDP, DTensor and compiled code count, too. They are seen at torch's dispatcher, with a
    `TorchDispatchMode`, in the test's own thread. A planned fault that does not happen fails the test, also if its rank
    has ended as announced.
    """

    def __init__(self, context: RankContext, injector: Injector) -> None:
        self._context = context
        self._injector = injector
        self._ends: list[ExpectedEnd] = []
        self._exchanges = 0

    def expect_exit(self, rank: int, *, status: int | None = None, signal: str | int | None = None) -> None:
        """Announce that the process of `rank` exits with `status`, or that `signal` (``"SIGKILL"``) kills it."""
        __tracebackhide__ = True
        if (status is None) == (signal is None):
            raise ValueError("expect_exit needs either status= or signal=")
        if signal is not None:
            status = -_signal_number(signal)
        elif type(status) is not int or not 0 <= status <= _LARGEST_STATUS:
            raise ValueError(f"status must be an int from 0 to {_LARGEST_STATUS}, got {status!r}")
        self._announce(ExpectedEnd(EndKind.EXIT, rank, status))

    def expect_hang(self, rank: int, *, after: float = 1.0) -> None:
        """Announce that `rank` does not finish the test: it is stopped `after` seconds after all others have."""
        __tracebackhide__ = True
        if not _is_duration(after) or after == 0:
            raise ValueError(f"after must be a finite number of seconds > 0, got {after!r}")
        self._announce(ExpectedEnd(EndKind.HANG, rank, after=float(after)))

    def expect_device_error(self, rank: int | None = None, text: str = "") -> None:
        """Announce that the test fails on `rank` (None: on each) with an error of its device that contains `text`.

        The error may be raised in the test, or by work for which the test has not waited. It is recognized by its
        class, which torch has since 2.8.
        """
        __tracebackhide__ = True
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {text!r}")
        ranks = range(self._context.spec.ranks) if rank is None else (rank,)
        self._announce(*(ExpectedEnd(EndKind.DEVICE_ERROR, one, text=text) for one in ranks))

    def expect_uneven_collectives(self) -> None:
        """Announce that the ranks issue different numbers of collectives in a process group."""
        __tracebackhide__ = True
        if self._context.spec.ranks == 1:
            raise ValueError("a test of one rank cannot issue different numbers of collectives")
        self._announce(ExpectedEnd(EndKind.UNEVEN_COLLECTIVES))

    def kill(self, rank: int, at: str | None = None, n: int = 1) -> None:
        """Plan that SIGKILL kills `rank`, and announce it as :meth:`expect_exit` does."""
        __tracebackhide__ = True
        self._injector.check()
        fault = Fault("kill", at, n, lambda: kill(getpid(), signals.SIGKILL))
        self.expect_exit(rank, signal="SIGKILL")
        self._plan(rank, fault)

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

    def _plan(self, rank: int, fault: Fault) -> None:
        __tracebackhide__ = True
        self._injector.check()
        self._check_rank(rank)
        if rank == self._context.rank:
            self._injector.plan(fault)

    def _announce(self, *ends: ExpectedEnd) -> None:
        """Tell the driver, then wait until the other ranks have told it the same. Raise ValueError if they differ."""
        __tracebackhide__ = True
        self._check(ends)
        # Before the exchange: when it returns, the driver's connections have the announcements of all ranks.
        self._context.announce(ends, self._injector.missing)
        self._ends += ends
        if self._context.spec.ranks > 1:
            self._compare(ends)

    def _check(self, ends: tuple[ExpectedEnd, ...]) -> None:
        """Raise ValueError for ends that cannot be judged."""
        __tracebackhide__ = True
        known = {end.rank for end in self._ends}
        for end in ends:
            if end.kind is not EndKind.UNEVEN_COLLECTIVES:
                self._check_rank(end.rank)
            if end.rank in known:
                what = "uneven collectives were" if end.rank is None else f"the end of rank {end.rank} was"
                raise ValueError(f"{what} announced before in this test; announce one end for each rank")
        if leave_nobody((*self._ends, *ends), self._context.spec.ranks):
            raise ValueError("the ends of all ranks would be announced; at least one rank must be left to report")

    def _check_rank(self, rank: object) -> None:
        """Raise ValueError if the test has no such rank."""
        __tracebackhide__ = True
        ranks = range(self._context.spec.ranks)
        if type(rank) is not int or rank not in ranks:
            raise ValueError(f"the test has no rank {rank!r}; its ranks are {ranks_text(ranks)}")

    def _compare(self, own: tuple[ExpectedEnd, ...]) -> None:
        """Exchange the announced ends `own` through the world's store, which works without a process group."""
        __tracebackhide__ = True
        context = self._context
        store, ranks = context.signed_store, range(context.spec.ranks)
        assert store is not None
        self._exchanges += 1
        turn = f"faults/{context.tests}/{self._exchanges}"
        store.set(f"{turn}/{context.rank}", json.encode(own))
        each = [json.decode(store.get(f"{turn}/{rank}"), type=tuple[ExpectedEnd, ...]) for rank in ranks]
        # Rank 0 serves the store: it must not end before the others have read.
        store.set(f"{turn}/{context.rank}/read", b"")
        for rank in ranks if context.rank == 0 else ():
            store.get(f"{turn}/{rank}/read")
        if any(ends != own for ends in each):
            texts = "; ".join(f"rank {rank} {announcement(ends)}" for rank, ends in enumerate(each))
            raise ValueError(f"the ranks must announce the same ends: {texts}")


def _is_duration(value: object) -> bool:
    """Return True for a finite number of seconds >= 0."""
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def _signal_number(signal: str | int) -> int:
    """Return the number of a signal, which `signal` names. Raise ValueError if there is no such signal."""
    try:
        return (signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)).value
    except (KeyError, ValueError):
        raise ValueError(f"there is no signal {signal!r}; name it as in 'SIGKILL'") from None


def _raise(error: BaseException) -> NoReturn:
    __tracebackhide__ = True
    raise error
