"""The driver's access to the pool: directly in the controller, over an execnet channel in an xdist worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pickle import dumps, loads
from queue import Empty, SimpleQueue
from threading import Lock
from traceback import format_exc
from typing import Any, Protocol

from pytest_accel.core.clock import PAUSES, monotonic
from pytest_accel.core.main_thread import MainThreadCalls
from pytest_accel.core.rank_exit import RankExit
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.worker_messages import (
    Answer,
    CancelRequest,
    ControllerMessage,
    EndAfterTest,
    EndWithUsageError,
    FailIfWaiting,
    InterruptedTest,
    ReleaseWorld,
    ShowLine,
    ShowWaiting,
    SubmitDemand,
    WarmServer,
    WatchExit,
    WorkerMessage,
    WorldWanted,
)
from pytest_accel.pool.world_request import PoolError, WorldGrant

WAITING_SHOWN_AFTER = 5.0
"""Seconds that a test waits before a line shows what it waits for; shorter waits are normal."""
WAITING_SHOWN_AGAIN = 60.0
"""Seconds until the line is shown again."""


_Value = WorldGrant | PoolError | RankExit | None
"""The values of an :class:`Answer`."""
_Answers = SimpleQueue[_Value | MainThreadCalls]
"""Queue of the answers to a request; in the controller also of calls to make while waiting for the answer."""


class PoolClient(Protocol):
    """The pool's methods for a driver. :meth:`acquire` and :meth:`rank_exit` block, the others do not."""

    def warm(self) -> None:
        """Start the fork server, since tests that need ranks are being collected."""

    def acquire(self, demand: WorldDemand, timeout: float | None) -> WorldGrant:
        """Wait for a world and return it; wait for its devices at most `timeout` seconds.

        Raise :class:`PoolError` if the pool cannot provide the world.
        """

    def release(self, world: int, kill_reason: str | None, noticed: frozenset[int], retire: bool) -> None:
        """Return a world to the pool; see :meth:`Pool.release`."""

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        """Return the exit status of a dead rank, or None if it is unknown after `timeout` seconds."""

    def wanted(self, world: int) -> bool:
        """Return True if another request waits for the devices or slots of `world`."""

    def record_interrupted(self, world: int, test: str) -> None:
        """Report an interrupt while `world` runs `test`; see :meth:`Pool.record_interrupted`."""

    def show(self, line: str) -> None:
        """Write a line to the session's terminal."""

    def usage_error(self, text: str) -> None:
        """End the session with `text`, because a test requests something impossible."""


class _WantedWorlds:
    """The worlds whose devices or slots another request waits for; the base class of both clients."""

    def __init__(self) -> None:
        self._wanted: set[int] = set()

    def wanted(self, world: int) -> bool:
        return world in self._wanted

    def on_wanted(self, world: int) -> None:
        self._wanted.add(world)

    def release(self, world: int, kill_reason: str | None, noticed: frozenset[int], retire: bool) -> None:
        raise NotImplementedError

    def _release_unused(self, granted: WorldGrant) -> None:
        """Return a world that nobody waits for any more."""
        self.release(granted.spec.world, "its driver has stopped waiting for it", frozenset(), False)


def _wait_for_world(
    answers: _Answers,
    timeout: float | None,
    show: Callable[[float], None],
    fail_if_waiting: Callable[[str], None],
    cancel: Callable[[], None],
    release: Callable[[WorldGrant], None],
) -> WorldGrant:
    """Wait for the answer to a request for a world; `timeout` limits the wait for devices, not the start of the ranks.

    ``show(seconds)`` is called when a long wait should be shown to the user. If the wait is interrupted, ``cancel()``
    ensures that no answer follows, and a world that the pool has granted at that moment is released.
    """
    began = monotonic()
    waited, show_at, limit = 0.0, WAITING_SHOWN_AFTER, math.inf if timeout is None else timeout
    try:
        while True:
            sleep = min(max(0.0, min(show_at, limit) - waited), PAUSES.LONGEST_SLEEP)
            due = monotonic() + sleep
            with suppress(Empty):
                answer = answers.get(timeout=sleep)
                if not isinstance(answer, MainThreadCalls):
                    break
                answer.run()
                continue
            PAUSES.notice(due)
            waited = monotonic() - began - PAUSES.since(began)
            if waited >= limit:
                fail_if_waiting(f"no devices came free within {timeout:g} s (--accel-wait)")
                limit = math.inf
            elif waited >= show_at:
                show(waited)
                show_at = waited + WAITING_SHOWN_AGAIN
    except KeyboardInterrupt:
        raise  # The session ends; the controller cancels the request after showing what it waited for.
    except BaseException:
        cancel()
        with suppress(Empty):
            while True:  # Calls for this thread may come before the answer. The next wait makes them.
                granted = answers.get_nowait()
                if isinstance(granted, WorldGrant):
                    release(granted)
        raise
    if isinstance(answer, PoolError):
        raise answer
    assert isinstance(answer, WorldGrant)
    return answer


def waiting_line(waiting: str, seconds: float | None = None) -> str:
    """Return the line that shows a waiting test to the user; `waiting` is the result of :meth:`Pool.waiting`."""
    return f"accel: {waiting if seconds is None else waiting_text(waiting, seconds)}"


def waiting_text(waiting: str, seconds: float) -> str:
    """Return the text about a test that has waited for `seconds`; `waiting` is the result of :meth:`Pool.waiting`."""
    return f"{waiting} (for {seconds:.0f} s now)"


class LocalPoolClient(_WantedWorlds):
    """The client of a pool in this process."""

    def __init__(self, pool: Pool, show: Callable[[str], None], calls: MainThreadCalls) -> None:
        """`show` writes a line to the terminal. `calls` are made while the client waits for a world."""
        super().__init__()
        self._pool = pool
        self._calls = calls
        self.show = show
        self.record_interrupted = pool.record_interrupted
        self.warm = pool.warm

    def acquire(self, demand: WorldDemand, timeout: float | None) -> WorldGrant:
        answers: _Answers = SimpleQueue()
        self._calls.wake = partial(answers.put, self._calls)
        self._calls.run()  # An interrupted wait may have left some.
        number = self._pool.acquire(demand, self, answers.put)

        def show(seconds: float) -> None:
            if (waiting := self._pool.waiting(number)) is not None:
                self.show(waiting_line(waiting, seconds))

        return _wait_for_world(
            answers,
            timeout,
            show,
            lambda why: self._pool.fail_if_waiting(number, why),
            lambda: self._pool.cancel(number),
            self._release_unused,
        )

    def release(self, world: int, kill_reason: str | None, noticed: frozenset[int], retire: bool) -> None:
        self._pool.release(world, kill_reason, noticed, retire)

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        answers: SimpleQueue[RankExit | None] = SimpleQueue()
        self._pool.watch_exit(world, rank, answers.put)
        try:
            return answers.get(timeout=timeout)
        except Empty:
            return None

    def usage_error(self, text: str) -> None:
        import pytest

        raise pytest.UsageError(text)


class Channel(Protocol):
    """The methods of `execnet.Channel` that are used here."""

    def send(self, item: object) -> None: ...

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None: ...


class WorkerPoolClient(_WantedWorlds):
    """The client in an xdist worker of the pool in the controller, at the other end of `channel`."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._lock = Lock()
        self._answers: dict[int, _Answers] = {}
        """The queue that gets the answer of each request; a request that was cancelled has none."""
        self._last_number = 0
        channel.setcallback(self._receive, endmarker=None)

    def warm(self) -> None:
        self._send(WarmServer())

    def acquire(self, demand: WorldDemand, timeout: float | None) -> WorldGrant:
        number, answers = self._expect()
        self._send(SubmitDemand(number, demand))
        return _wait_for_world(
            answers,
            timeout,
            lambda seconds: self._send(ShowWaiting(number, seconds)),
            lambda why: self._send(FailIfWaiting(number, why)),
            lambda: self._cancel(number),
            self._release_unused,
        )

    def _cancel(self, number: int) -> None:
        """Cancel a request for a world. If its answer is on its way, `_handle` releases the world."""
        with self._lock:
            self._answers.pop(number, None)
        self._send(CancelRequest(number))

    def release(self, world: int, kill_reason: str | None, noticed: frozenset[int], retire: bool) -> None:
        self._wanted.discard(world)
        self._send(ReleaseWorld(world, kill_reason, noticed, retire))

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        number, answers = self._expect()
        self._send(WatchExit(number, world, rank))
        try:
            end = answers.get(timeout=timeout)
        except Empty:
            return None
        return end if isinstance(end, RankExit) else None

    def record_interrupted(self, world: int, test: str) -> None:
        self._send(InterruptedTest(world, test))

    def show(self, line: str) -> None:
        self._send(ShowLine(line))

    def usage_error(self, text: str) -> None:
        self._send(EndWithUsageError(text))

    def _expect(self) -> tuple[int, _Answers]:
        """Return the number of a new request, and the queue that gets its answer."""
        self._last_number += 1
        answers = self._answers[self._last_number] = SimpleQueue()
        return self._last_number, answers

    def _send(self, message: WorkerMessage) -> None:
        self._channel.send(dumps(message))

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            self._fail("the main pytest process has ended")
            return
        try:
            self._handle(loads(data))
        except BaseException:  # execnet would close the channel without a message.
            self._fail(f"an answer of the main pytest process could not be handled:\n{format_exc()}")
            raise

    def _fail(self, why: str) -> None:
        for answers in list(self._answers.values()):
            answers.put(PoolError(why))

    def _handle(self, message: ControllerMessage) -> None:
        if isinstance(message, WorldWanted):
            self.on_wanted(message.world)
            return
        with self._lock:
            answers = self._answers.pop(message.number, None)
            if answers is not None:
                answers.put(message.value)
        if answers is None and isinstance(message.value, WorldGrant):
            self._release_unused(message.value)


class PoolService:
    """Answers the messages of one xdist worker, which the controller's end of the worker's channel receives.

    The methods run in execnet's receiver thread, so they must be short.
    """

    def __init__(
        self,
        pool: Callable[[], Pool],
        channel: Channel,
        on_usage_error: Callable[[str], None],
        show: Callable[[str], None],
        on_end_after_test: Callable[[int], None],
    ) -> None:
        """`pool` returns the pool, creating it at the first call, which is when a worker first needs it.

        `show` writes a line to the terminal. `on_end_after_test` gets the index of a test after which the worker ends.
        """
        self._get_pool = pool
        self._channel = channel
        self._on_usage_error = on_usage_error
        self._show = show
        self._on_end_after_test = on_end_after_test
        self._used_pool: Pool | None = None
        """The pool; None if the worker has not needed it, or it could not be created."""
        self._requests: dict[int, int] = {}
        """The pool's id of each request of the worker."""

    @property
    def _pool(self) -> Pool:
        self._used_pool = self._get_pool()
        return self._used_pool

    def on_wanted(self, world: int) -> None:
        self._send(WorldWanted(world))

    def _send(self, message: ControllerMessage) -> None:
        with suppress(OSError):  # The worker has ended; the end marker follows.
            self._channel.send(dumps(message))

    def receive(self, data: bytes | None) -> None:
        """Handle a message of the worker; None says that the worker has ended."""
        if data is None:
            if self._used_pool is not None:
                with self._failing():
                    self._used_pool.driver_lost(self)
            return
        with self._failing():
            message: WorkerMessage = loads(data)
            with self._failing(message.number if isinstance(message, (SubmitDemand, WatchExit)) else None):
                self._handle(message)

    @contextmanager
    def _failing(self, number: int | None = None) -> Iterator[None]:
        """On error, answer the worker's request `number` with it and fail the pool; execnet would hide the error.

        If the pool could not be created, each request gets the error.
        """
        try:
            yield
        except BaseException:
            why = f"a request of an xdist worker has ended with an error:\n{format_exc()}"
            if number is not None:
                self._answer(number, PoolError(why))
            if self._used_pool is not None:
                self._used_pool.fail(why)

    def _handle(self, message: WorkerMessage) -> None:
        match message:
            case SubmitDemand(number, demand):
                self._requests[number] = self._pool.acquire(demand, self, lambda answer: self._answer(number, answer))
            case ShowWaiting(number, seconds):
                if (waiting := self._pool.waiting(self._requests.get(number, 0))) is not None:
                    self._show(waiting_line(waiting, seconds))
            case FailIfWaiting(number, why):
                self._pool.fail_if_waiting(self._requests.get(number, 0), why)
            case CancelRequest(number):
                self._pool.cancel(self._requests.pop(number, 0))
            case ReleaseWorld(world, kill_reason, noticed, retire):
                self._pool.release(world, kill_reason, noticed, retire)
            case InterruptedTest(world, test):
                self._pool.record_interrupted(world, test)  # Slow, but the session is ending.
            case WatchExit(number, world, rank):
                self._pool.watch_exit(world, rank, lambda end: self._answer(number, end))
            case WarmServer():
                self._pool.warm()
            case ShowLine(line):
                self._show(line)
            case EndWithUsageError(text):
                self._on_usage_error(text)
            case EndAfterTest(index):
                self._on_end_after_test(index)

    def _answer(self, number: int, value: _Value) -> None:
        self._requests.pop(number, None)
        self._send(Answer(number, value))
