"""Counts of the point-to-point operations that this rank has issued. Runs in ranks only.

A message that nobody has received stays in its process group, and the next test would receive it. torch numbers
messages for nccl only, and its flight recorder, a ring buffer, has none of gloo's. But all functions of
`torch.distributed` for messages, also those for several and for objects, call the methods `send`, `recv` and
`recv_anysource` of the process group. So these methods are replaced with ones that count. They do not see calls in C++,
which only compiled code makes (`torch_api.compiles_messages`), nor those of a backend's own object.

Only what tests issue is judged. A fixture of a wider scope may send in its setup what a later test receives, and its
threads may send at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from sys import _getframe
from threading import Lock, Thread, _DummyThread, get_ident, main_thread
from threading import enumerate as living_threads
from time import sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pytest_accel.core import torch_api
from pytest_accel.core.rank_messages import CallSite, Channel, GroupMessages, MessageCount

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

_TAGGED = frozenset(("gloo", "mpi"))
"""Backends with which only operations with the same tag meet. The others ignore tags."""
_TORCH = "torch.distributed.distributed_c10d"
"""The module with torch's functions for messages."""
_LOOKS = 100
_INTERVAL = 0.005
"""Number of looks at an operation that is being issued, and seconds between two. torch takes microseconds for it."""
_SKIPPED = ("torch.", f"{__name__.partition('.')[0]}.")
"""Packages whose lines are not shown as the place of an operation."""


class _Count:
    """The operations of the running test with one channel and tag, and the frame of the last one."""

    __slots__ = ("code", "function", "line", "number")

    def __init__(self) -> None:
        self.number = 0

    def add(self, method: str, frame: FrameType) -> None:
        """Count an operation of the group's `method`, which was called in `frame`."""
        self.number += 1
        self.function, self.code, self.line = find_place(method, frame)

    def place(self) -> CallSite:
        """Return the line of the suite with the last operation, and the function of torch that it calls."""
        return CallSite(self.function, self.code.co_filename, self.line)


class _Operations:
    """The operations that this rank has issued in one process group."""

    def __init__(self) -> None:
        self.lock = Lock()  # Tests and fixtures send from several threads.
        self.begun = self.ended = 0
        """Numbers of operations, also of those that torch has refused. They differ while one is being issued."""
        self.on_cpu = 0
        """Number of operations on tensors of the CPU since the group was made."""
        self.issued: dict[Channel, int] = {}
        """Number of operations since the group was made."""
        self.by_test: dict[tuple[Channel, int], _Count] = {}
        """The operations of the running test by channel and tag."""
        self.last: dict[Channel, Work] = {}
        """The result of the test's last operation that receives into a tensor of the CPU."""
        self.shared: set[tuple[Channel, Thread]] = set()
        """Channels that threads of wider fixtures use, as long as these threads live."""

    def __enter__(self) -> _Operations:
        return self

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.ended += 1

    def without(self, number: Callable[[], int]) -> int | None:
        """Return `number` less the operations on tensors of the CPU, which it contains.

        Threads of fixtures may issue one at any time. None: they do all the time.
        """
        for _ in range(_LOOKS):
            begun = self.begun
            if begun == self.ended:
                rest = number() - self.on_cpu
                if begun == self.begun:
                    return rest
            sleep(_INTERVAL)
        return None

    def end(self, group: ProcessGroup) -> GroupMessages:
        """Return the operations of the test that has ended."""
        tagged = group.name() in _TAGGED
        with self.lock:
            counts = tuple(
                MessageCount(channel, tag if tagged else 0, one.number, one.place())
                for (channel, tag), one in self.by_test.items()
            )
            failed = {channel for channel, work in self.last.items() if _has_failed(work)}
            self.by_test, self.last = {}, {}
            shared = frozenset(channel for channel, thread in self.shared if thread.is_alive())
            return GroupMessages(dict(self.issued), counts, frozenset(failed), shared)


class PointToPointCounter:
    """Counts the operations of this rank; one for each rank."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[ProcessGroup, _Operations] = WeakKeyDictionary()
        self._in_test = False
        """True while operations are those of a test, and not of a wider fixture."""
        self._older_threads: dict[int | None, Thread] = {}
        """Threads that the running test has not started, by identifier."""

    def install(self) -> None:
        """Count the operations of all process groups from now on."""
        import torch.distributed as dist

        send, recv = dist.ProcessGroup.send, dist.ProcessGroup.recv
        recv_anysource = dist.ProcessGroup.recv_anysource
        issuing, add = self._issuing, self._add

        # The parameters have torch's names, with which they may be passed.
        @wraps(send)
        def counted_send(self: ProcessGroup, tensors: list[Tensor], dstRank: int, tag: int) -> Work:
            __tracebackhide__ = True
            channel = (False, dstRank)
            with issuing(self, channel) as operations:
                work = send(self, tensors, dstRank, tag)
                add(operations, channel, tag, work, tensors)
            return work

        @wraps(recv)
        def counted_recv(self: ProcessGroup, tensors: list[Tensor], srcRank: int, tag: int) -> Work:
            __tracebackhide__ = True
            channel = (True, srcRank)
            with issuing(self, channel) as operations:
                work = recv(self, tensors, srcRank, tag)
                add(operations, channel, tag, work, tensors)
            return work

        @wraps(recv_anysource)
        def counted_recv_anysource(self: ProcessGroup, tensors: list[Tensor], tag: int) -> Work:
            __tracebackhide__ = True
            channel = (True, None)
            with issuing(self, channel) as operations:
                work = recv_anysource(self, tensors, tag)
                add(operations, channel, tag, work, tensors)
            return work

        uncounted = self._uncounted
        monitored_barrier = dist.ProcessGroup.monitored_barrier  # type: ignore[attr-defined]

        @wraps(monitored_barrier)
        def uncounted_barrier(self: ProcessGroup, *args: Any, **named: Any) -> Any:
            __tracebackhide__ = True
            with uncounted(self):
                return monitored_barrier(self, *args, **named)

        methods: tuple[Any, ...] = counted_send, counted_recv, counted_recv_anysource, uncounted_barrier
        for method in methods:
            replace_method(dist.ProcessGroup, method.__name__, method)

    def _operations(self, group: ProcessGroup) -> _Operations:
        operations = self._groups.get(group)
        return self._groups.setdefault(group, _Operations()) if operations is None else operations

    @contextmanager
    def _uncounted(self, group: ProcessGroup) -> Iterator[None]:
        """Leave out the messages that gloo itself sends in the ``with`` block.

        In a monitored barrier, rank 0 exchanges messages with each other rank, so their numbers differ.
        """
        operations = self._operations(group)
        with operations.lock:
            operations.begun += 1
        with operations:
            before = torch_api.sequence_number(group)
            try:
                yield
            finally:
                after = torch_api.sequence_number(group)
                with operations.lock:
                    operations.on_cpu += after - before

    def _issuing(self, group: ProcessGroup, channel: Channel) -> _Operations:
        """Return the operations in `group`, a context manager in which the next one is issued on `channel`."""
        operations = self._operations(group)
        with operations.lock:
            operations.begun += 1
            if (thread := self._older_thread()) is not None:
                operations.shared.add((channel, thread))
        return operations

    def _older_thread(self) -> Thread | None:
        """Return the current thread if the running test has not started it."""
        thread = self._older_threads.get(get_ident())
        return thread if thread is not None and thread.is_alive() else None  # Identifiers are used again.

    def in_test(self) -> bool:
        """Return whether the running test has called this method, and not a wider fixture or a thread of one."""
        return self._in_test and self._older_thread() is None

    def _add(self, operations: _Operations, channel: Channel, tag: int, work: Work, tensors: list[Tensor]) -> None:
        on_cpu = tensors[0].is_cpu
        with operations.lock:
            operations.on_cpu += on_cpu
            operations.issued[channel] = operations.issued.get(channel, 0) + 1
            if self.in_test():
                key = channel, tag
                count = operations.by_test.get(key)
                if count is None:
                    count = operations.by_test[key] = _Count()
                count.add("recv" if channel[0] else "send", _getframe(2))
                if on_cpu and channel[0]:
                    operations.last[channel] = work

    def begin(self) -> None:
        """Begin the operations of a test."""
        self._older_threads = _threads()
        for operations in list(self._groups.values()):
            with operations.lock:
                operations.shared = {(channel, thread) for channel, thread in operations.shared if thread.is_alive()}
        self._in_test = True

    @contextmanager
    def wider_fixture(self) -> Iterator[None]:
        """Attribute operations in the ``with`` block, and those of threads that it starts, to a wider fixture."""
        in_test, self._in_test = self._in_test, False
        before = _threads()
        try:
            yield
        finally:
            self._in_test = in_test
            started = _threads()
            self._older_threads |= {ident: started[ident] for ident in started.keys() - before.keys()}

    def without_messages(self, group: ProcessGroup, number: Callable[[], int]) -> int | None:
        """Return `number`, a count of all operations in `group`, less the messages; None if it is unknown."""
        operations = self._groups.get(group)
        return number() if operations is None else operations.without(number)

    def has_messages(self, group: ProcessGroup) -> bool:
        """Return whether this rank has begun an operation in `group` since the group was made."""
        operations = self._groups.get(group)
        return operations is not None and operations.begun > 0

    def end(self, groups: Iterable[ProcessGroup]) -> list[tuple[ProcessGroup, GroupMessages]]:
        """End the operations of the test, and return those in `groups`, without groups that had none."""
        self._in_test = False
        return [(group, self._groups[group].end(group)) for group in groups if group in self._groups]


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


def _has_failed(work: Work) -> bool:
    """Return whether a wait for `work`, a receive, has raised an error. torch deprecates `Work.exception`."""
    with suppress(RuntimeError):  # The backend does not know the sender.
        return work.is_completed() and torch_api.source_rank(work) < 0
    return False


def _threads() -> dict[int | None, Thread]:
    """Return the running threads but the main one, by identifier.

    Threads that Python has not started, such as those of torch's autograd, work for the test and are left out.
    """
    me = main_thread()
    return {
        thread.ident: thread for thread in living_threads() if thread is not me and not isinstance(thread, _DummyThread)
    }
