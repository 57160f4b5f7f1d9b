"""The operations of torch.distributed that this rank has issued, and what it has not waited for. Runs in ranks only.

A message that nobody has received stays in its process group, and the next test would receive it. torch numbers
messages for nccl only. But all functions of `torch.distributed` for messages, also those for several and for objects,
call the methods `send`, `recv` and `recv_anysource` of the process group. So these methods are replaced with functions
that count the calls.

gloo completes a collective in a thread. If it fails after the end of its test, the failure is never seen, or it closes
the connections of the next test. So the methods of the process group that start collectives are replaced with functions
that keep the result until it is complete, and the methods that wait for the result with functions that release it: code
that waits sees the error. Only collectives that tests start are judged, and only gloo's on tensors of the CPU are kept:
`torch_devices.failed_work` waits for nccl's.

The functions do not see calls in C++, which for messages only compiled code makes (torch._dynamo's option
`enable_p2p_compilation`), nor calls of a backend's own object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import update_wrapper
from sys import _getframe
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from msgspec import structs

from pytest_accel.compat import torch_api
from pytest_accel.core.clock import monotonic
from pytest_accel.core.truncation import first_line
from pytest_accel.messages.rank_messages import Channel, UnawaitedCollective
from pytest_accel.rank.stack_file import StackFile

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

Issued = tuple[Callable[[], "ProcessGroup | None"], Channel | None, int | None]
"""An operation: a reference to its group, its channel or None for a collective, its number in the channel or group."""
_LIMIT = 2.0
"""Seconds for all collectives of a test at its end. All ranks have started them, and gloo takes milliseconds."""
_SHORTEST = timedelta(milliseconds=1)
"""torch waits without a limit if the limit is zero."""
_TAGGED = frozenset(("gloo", "mpi"))
"""Backends with which only operations with the same tag meet. The others ignore tags."""
_TORCH = "torch.distributed.distributed_c10d"
"""The module with torch's functions for messages."""
_SKIPPED = ("torch.", f"{__name__.partition('.')[0]}.")
"""Packages whose lines are not shown as the place of an operation."""


class _Counts:
    """The operations that this rank has issued in one process group since the group was made."""

    def __init__(self) -> None:
        self.lock = Lock()
        """Held while an operation of gloo is issued and counted: threads of fixtures may send at any time."""
        self.issued: Counter[Channel] = Counter()
        self.numbered = 0
        """Number of messages that gloo has numbered together with collectives."""


class Operations:
    """The operations of this rank; one for each rank."""

    def __init__(self, in_test: Callable[[], bool]) -> None:
        """`in_test` returns whether the call of a test is running."""
        self._in_test = in_test
        self._groups: WeakKeyDictionary[ProcessGroup, _Counts] = WeakKeyDictionary()
        self._works: WeakKeyDictionary[Work, Issued] = WeakKeyDictionary()
        """The operations by their results."""
        self.awaited: Issued | None = None
        """The operation for whose result this rank waits without a limit, in any thread."""
        self.stack_file: StackFile
        self._started: dict[Work, UnawaitedCollective] = {}
        """The collectives of the running test that nobody has waited for, by their results."""
        self._failed = False
        """True if a wait for an operation of any kind has raised an error since the last test."""

    def install(self) -> None:
        """Record the operations of all process groups from now on."""
        import torch
        import torch.distributed as dist

        self._cpu = torch.device("cpu")
        self._tensor = torch.Tensor
        self._wait: Callable[..., object] = dist.Work.wait
        for name in ("send", "recv", "recv_anysource"):
            replace_method(dist.ProcessGroup, name, self._issue_message)
        replace_method(dist.ProcessGroup, "monitored_barrier", self._run_monitored_barrier)
        for name in torch_api.collective_methods():
            replace_method(dist.ProcessGroup, name, self._issue_collective)
        for name in ("wait", "get_future"):
            replace_method(dist.Work, name, self._wait_for)

    def _issue_message(self, issue: Any, group: ProcessGroup, tensors: list[Tensor], *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        counts, name = self._groups.setdefault(group, _Counts()), issue.__name__
        tag = named["tag"] if "tag" in named else args[-1] if args else 0
        peer = args[0] if args else named.get("dstRank", named.get("srcRank"))
        channel = name != "send", None if name == "recv_anysource" else peer, tag if group.name() in _TAGGED else 0
        on_cpu = all(getattr(tensor, "is_cpu", False) for tensor in tensors)
        # gloo takes microseconds, but nccl may wait for the other rank.
        with counts.lock if on_cpu else nullcontext():
            work = issue(group, tensors, *args, **named)
            counts.issued[channel] += 1
            counts.numbered += on_cpu
            if on_cpu and work is not None:
                self._works[work] = ref(group), channel, counts.issued[channel]
        return work

    def _run_monitored_barrier(self, run: Any, group: ProcessGroup, *args: Any, **named: Any) -> Any:
        """Leave out the messages that gloo itself sends: rank 0 exchanges some with each other rank."""
        __tracebackhide__ = True
        counts = self._groups.setdefault(group, _Counts())
        before = torch_api.sequence_number(group) or 0
        try:
            return run(group, *args, **named)
        finally:
            with counts.lock:
                counts.numbered += (torch_api.sequence_number(group) or 0) - before

    def _issue_collective(self, issue: Any, group: ProcessGroup, *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        work = issue(group, *args, **named)
        if work is not None:
            self._works[work] = ref(group), None, self.collectives(group)
            self._keep(group, issue.__name__, work, (*args, *named.values()))
        return work

    def _wait_for(self, wait: Any, work: Work, *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        self.awaited = self._works.get(work) if wait.__name__ == "wait" and not args and not named else None
        try:
            return wait(work, *args, **named)
        except RuntimeError:
            self._failed = True
            raise
        finally:
            self.awaited = None
            self._release(work)

    # Counts

    def collectives(self, group: ProcessGroup) -> int | None:
        """Return the number of collectives in `group` since it was made, as in torch's record; None if unknown."""
        counts = self._groups.get(group)
        if counts is None or group.name() != "gloo":
            return torch_api.sequence_number(group)
        with counts.lock:  # gloo numbers messages, too.
            return (torch_api.sequence_number(group) or 0) - counts.numbered

    def messages(self, group: ProcessGroup) -> tuple[tuple[Channel, int], ...]:
        """Return the numbers of messages in `group` since it was made, by channel."""
        return tuple(self._groups[group].issued.items()) if group in self._groups else ()

    # Collectives without a wait

    def _keep(self, group: ProcessGroup, name: str, work: Work, args: tuple[object, ...]) -> None:
        function, code, line = find_place(name, _getframe(3))
        self.stack_file.set_place(code, line)
        if self._in_test() and self._is_of_gloo(group, args):
            self._started[work] = UnawaitedCollective(function, code.co_filename, line, None)

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
        if work in self._started and work.is_completed():
            self._started.pop(work, None)

    def take_failure(self) -> bool:
        """Return whether a wait for an operation has raised an error since the last call of this function."""
        failed, self._failed = self._failed, False
        return failed

    def end(self) -> tuple[UnawaitedCollective, ...]:
        """End the test: wait for its collectives, and return the collectives that failed or did not complete."""
        self.stack_file.clear_place()
        left, self._started = self._started, {}
        deadline = monotonic() + _LIMIT
        found = []
        for work, one in left.items():
            try:
                self._wait(work, max(timedelta(seconds=deadline - monotonic()), _SHORTEST))
            except RuntimeError as error:
                found.append(structs.replace(one, error=first_line(error) if work.is_completed() else None))
        return tuple(found)


def replace_method(owner: type, name: str, call: Callable[..., Any]) -> None:
    """Replace the method `name` of a class of torch, written in C++, with a function that makes `call` instead.

    The arguments of `call` are the original method, the object, and the arguments of the method.
    """
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        return call(original, self, *args, **named)

    update_wrapper(method, original)
    # pybind11 recognizes by this name that a method of a subclass calls its original, and then does not call it again.
    method.__code__ = method.__code__.replace(co_name=name)
    torch_api.skip_in_compiler(method.__code__)
    setattr(owner, name, method)


def find_place(method: str, frame: FrameType) -> tuple[str, CodeType, int]:
    """Return the function of torch that the suite has called, or `method`, and the code and line of the call.

    `frame` is the caller of the process group's `method`.
    """
    function = method
    caller: FrameType | None = frame
    while caller is not None and (module := caller.f_globals.get("__name__", "")).startswith(_SKIPPED):
        if module == _TORCH and caller.f_code.co_name[0] != "_":
            function = f"dist.{caller.f_code.co_name}"
        frame, caller = caller, caller.f_back
    return function, (caller or frame).f_code, (caller or frame).f_lineno
