"""Counts of the operations that this rank has issued, and the one that it waits for. Runs in ranks only.

A message that nobody has received stays in its process group, and the next test would receive it. torch numbers
messages for nccl only. But all functions of `torch.distributed` for messages, also those for several and for objects,
call the methods `send`, `recv` and `recv_anysource` of the process group. So these methods are replaced with ones that
count. They do not see calls in C++, which only compiled code makes (`torch_api.compiles_messages`), nor those of a
backend's own object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from pytest_accel.compat import torch_api
from pytest_accel.messages.flight_record import COLLECTIVES
from pytest_accel.messages.rank_messages import Channel

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

Issued = tuple[Callable[[], "ProcessGroup | None"], Channel | None, int | None]
"""An operation: a reference to its group, its channel (None: a collective), and its number in that or in the group."""
_TAGGED = frozenset(("gloo", "mpi"))
"""Backends with which only operations with the same tag meet. The others ignore tags."""
_TORCH = "torch.distributed.distributed_c10d"
"""The module with torch's functions for messages."""
_SKIPPED = ("torch.", f"{__name__.partition('.')[0]}.")
"""Packages whose lines are not shown as the place of an operation."""


class _Operations:
    """The operations that this rank has issued in one process group since the group was made."""

    def __init__(self) -> None:
        self.lock = Lock()
        """Held while an operation of gloo is issued and counted: threads of fixtures may send at any time."""
        self.issued: Counter[Channel] = Counter()
        self.numbered = 0
        """Number of those that gloo numbers as it numbers collectives."""


class PointToPointCounter:
    """Counts the operations of this rank; one for each rank."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[ProcessGroup, _Operations] = WeakKeyDictionary()
        self.works: WeakKeyDictionary[Work, Issued] = WeakKeyDictionary()
        """The operations by their results."""
        self.awaited: Work | None = None
        """The result for which this rank waits without a limit, in any thread."""

    def install(self) -> None:
        """Count the operations of all process groups from now on."""
        import torch.distributed as dist

        for name in ("send", "recv", "recv_anysource"):
            replace_method(dist.ProcessGroup, name, self._counting(name, getattr(dist.ProcessGroup, name)))
        barrier: Any = dist.ProcessGroup.monitored_barrier  # type: ignore[attr-defined]
        replace_method(dist.ProcessGroup, "monitored_barrier", self._counting_barrier(barrier))

    def _of(self, group: ProcessGroup) -> _Operations:
        operations = self._groups.get(group)
        return self._groups.setdefault(group, _Operations()) if operations is None else operations

    def _counting(self, name: str, original: Any) -> Any:
        of, works = self._of, self.works

        @wraps(original)
        def method(self: ProcessGroup, tensors: list[Tensor], *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            operations = of(self)
            tag = named["tag"] if "tag" in named else args[-1] if args else 0
            peer = args[0] if args else named.get("dstRank", named.get("srcRank"))
            channel = name != "send", None if name == "recv_anysource" else peer, tag if self.name() in _TAGGED else 0
            if not all(getattr(tensor, "is_cpu", False) for tensor in tensors):  # nccl may wait for the other rank.
                work = original(self, tensors, *args, **named)
                with operations.lock:
                    operations.issued[channel] += 1
                return work
            with operations.lock:  # gloo takes microseconds.
                work = original(self, tensors, *args, **named)
                operations.issued[channel] += 1
                operations.numbered += 1
                if work is not None:
                    works[work] = ref(self), channel, operations.issued[channel]
            return work

        return method

    def _counting_barrier(self, original: Any) -> Any:
        of = self._of

        @wraps(original)
        def monitored_barrier(self: ProcessGroup, *args: Any, **named: Any) -> Any:
            """Leave out the messages that gloo itself sends: rank 0 exchanges some with each other rank."""
            __tracebackhide__ = True
            operations, before = of(self), torch_api.sequence_number(self) or 0
            try:
                return original(self, *args, **named)
            finally:
                with operations.lock:
                    operations.numbered += (torch_api.sequence_number(self) or 0) - before

        return monitored_barrier

    def collectives(self, group: ProcessGroup) -> int | None:
        """Return the number of collectives in `group` since it was made, as in torch's record; None if it is unknown.

        The number of the group is another one: gloo numbers messages, too.
        """
        operations = self._groups.get(group)
        if operations is None or group.name() != "gloo":
            return torch_api.sequence_number(group)
        with operations.lock:
            return (torch_api.sequence_number(group) or 0) - operations.numbered

    def counts(self, group: ProcessGroup) -> dict[str, int]:
        """Return the numbers of collectives and messages in `group` since it was made, by counter."""
        messages = self._groups[group].issued if group in self._groups else {}
        found = {counter(channel): number for channel, number in list(messages.items())}
        return found if (number := self.collectives(group)) is None else {COLLECTIVES: number, **found}

    def has_messages(self, group: ProcessGroup) -> bool:
        """Return whether this rank has begun an operation in `group` since the group was made."""
        return group in self._groups

    def issued(self, group: ProcessGroup) -> dict[Channel, int]:
        """Return the numbers of messages in `group` since it was made."""
        return dict(self._groups[group].issued)


def counter(channel: Channel) -> str:
    """Return the name under which a record has the number of operations of a `channel`."""
    receives, peer, tag = channel
    return f"{'received' if receives else 'sent'} {peer} {tag}"


def replace_method(owner: type, name: str, method: Any) -> None:
    """Replace the method `name` of a class of torch, written in C++, with the function `method`, which calls it."""
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
