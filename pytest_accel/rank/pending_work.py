"""Collectives that a test has started and not waited for. Runs in ranks only.

gloo completes a collective in a thread. If it fails after the end of its test, the failure is never seen, or it closes
the connections of the next test. So the methods of the process group that start collectives are replaced with ones that
keep the result until it is complete, and those that wait for the result with ones that release it: whoever waits sees
the error. As with `point_to_point`, calls in C++ are not seen, and only what tests start is judged.

Only gloo's collectives on tensors of the CPU are kept. `torch_devices.wait_for_devices` waits for those of nccl.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from sys import _getframe
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from pytest_accel.compat import torch_api
from pytest_accel.core.clock import monotonic
from pytest_accel.messages.rank_messages import UnawaitedCollective
from pytest_accel.rank.point_to_point import PointToPointCounter, find_place, replace_method
from pytest_accel.rank.raised_errors import first_line

if TYPE_CHECKING:
    from types import CodeType

    from torch.distributed import ProcessGroup, Work

_LIMIT = 2.0
"""Seconds at the end of a test for all its collectives. All ranks have started them, and gloo takes milliseconds."""
_SHORTEST = timedelta(milliseconds=1)
"""torch waits without a limit if the limit is zero."""


class _Started(NamedTuple):
    """A collective that has been started, and where."""

    work: Work
    function: str
    code: CodeType
    line: int


class PendingWork:
    """The collectives of the running test that nobody has waited for; one for each rank."""

    def __init__(self, in_test: Callable[[], bool], operations: PointToPointCounter) -> None:
        """`in_test` returns whether the call of a test is running. `operations` gets to know each collective."""
        self._in_test = in_test
        self._operations = operations
        self._lock = Lock()  # Tests start collectives from several threads.
        self._started: dict[int, _Started] = {}
        """By the identity of the result, which is kept."""
        self._failed = False
        """True if a wait for an operation of any kind has raised an error since the last test."""

    def install(self) -> None:
        """Keep the results of collectives from now on."""
        import torch
        import torch.distributed as dist

        self._cpu = torch.device("cpu")
        self._tensor = torch.Tensor
        self._wait: Callable[..., object] = dist.Work.wait
        for name in torch_api.collective_methods():
            self._keep_result_of(dist.ProcessGroup, name)
        for name in ("wait", "get_future"):
            self._release_after(dist.Work, name)

    def _keep_result_of(self, owner: Any, name: str) -> None:
        original, add, operations = getattr(owner, name), self._add, self._operations

        @wraps(original)
        def method(self: ProcessGroup, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            work = original(self, *args, **named)
            if work is not None:
                operations.works[work] = ref(self), None, operations.collectives(self)
                add(self, name, work, (*args, *named.values()))
            return work

        replace_method(owner, name, method)

    def _release_after(self, owner: Any, name: str) -> None:
        original, release, pending, operations = getattr(owner, name), self._release, self, self._operations

        @wraps(original)
        def method(self: Work, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            operations.awaited = self if name == "wait" and not args and not named else None
            try:
                return original(self, *args, **named)
            except RuntimeError:
                pending._failed = True
                raise
            finally:
                operations.awaited = None
                release(self)

        replace_method(owner, name, method)

    def _add(self, group: ProcessGroup, name: str, work: Work, args: tuple[object, ...]) -> None:
        if self._in_test() and self._is_of_gloo(group, args):
            started = _Started(work, *find_place(name, _getframe(2)))
            with self._lock:
                self._forget_successful()
                self._started[id(work)] = started

    def _is_of_gloo(self, group: ProcessGroup, args: tuple[object, ...]) -> bool:
        """Return whether gloo runs a collective of `group` with the arguments `args`."""
        for value in args:
            while isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, self._tensor):
                return value.is_cpu and torch_api.backend_name(group, self._cpu) == "gloo"
        return bool(group.name() == "gloo")  # A barrier has no tensors.

    def _release(self, work: Work) -> None:
        """Forget `work`, whose result its test knows, unless only the limit of the wait has passed."""
        if id(work) in self._started:
            with self._lock:
                if work.is_completed():
                    self._started.pop(id(work), None)

    def _forget_successful(self) -> None:
        """Forget the first collectives that have succeeded, so that their tensors are not kept in memory."""
        for key, started in list(self._started.items()):
            if not started.work.is_completed():
                break
            with suppress(RuntimeError):  # It has failed, and its test may still wait for it.
                self._wait(started.work)
                del self._started[key]

    def take_failure(self) -> bool:
        """Return whether a wait for an operation has raised an error since the last call of this function."""
        failed, self._failed = self._failed, False
        return failed

    def end(self) -> tuple[UnawaitedCollective, ...]:
        """End the test: wait for its collectives, and return those that failed or did not complete."""
        if not self._started:
            return ()
        with self._lock:
            left, self._started = self._started, {}
        deadline = monotonic() + _LIMIT
        return tuple(bad for one in left.values() if (bad := self._ended(one, deadline)) is not None)

    def _ended(self, one: _Started, deadline: float) -> UnawaitedCollective | None:
        """Wait for a collective, until `deadline` at the latest; return it unless it has succeeded."""
        try:
            self._wait(one.work, max(timedelta(seconds=deadline - monotonic()), _SHORTEST))
        except RuntimeError as error:
            failure = first_line(error) if one.work.is_completed() else None
            return UnawaitedCollective(one.function, one.code.co_filename, one.line, failure)
        return None
