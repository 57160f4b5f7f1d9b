"""The driver's end of its conversation with the pool."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pickle import dumps, loads
from queue import Empty, SimpleQueue
from threading import Lock
from traceback import format_exc
from typing import Any, Protocol

from pytest_accel.core.clock import monotonic
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.rank_exit import RankExit
from pytest_accel.pool.pool_messages import (
    CancelRequest,
    DriverMessage,
    EndWithUsageError,
    FailIfWaiting,
    InterruptedTest,
    PoolError,
    PoolMessage,
    ReleaseWorld,
    ShowLine,
    ShowWaiting,
    SubmitDemand,
    WarmServer,
    WatchExit,
    WorldGrant,
    WorldWanted,
)

WAITING_SHOWN_AFTER = 5.0
"""Seconds that a test waits before a line shows what it waits for; shorter waits are normal."""
WAITING_SHOWN_AGAIN = 60.0
"""Seconds until the line is shown again."""

Value = WorldGrant | PoolError | RankExit | None
"""The values of an :class:`Answer`."""
_Answers = SimpleQueue[Value]


class Channel(Protocol):
    """The methods of `execnet.Channel` that are used here."""

    def send(self, item: object) -> None: ...

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None: ...


class PoolClient:
    """A driver's access to the pool. It sends the messages of `pool_messages`, and gets the answers.

    The driver in the controller and those in xdist's workers use the same messages. In the controller a message is a
    call of the pool, and in a worker it goes over execnet's channel.
    """

    def __init__(self, send: Callable[[DriverMessage], None]) -> None:
        """`send` sends a message to the pool."""
        self._send = send
        self._lock = Lock()
        self._answers: dict[int, _Answers] = {}
        """The queue that gets the answer of each request; a request that was cancelled has none."""
        self._last_number = 0
        self._wanted: set[int] = set()

    @classmethod
    def over(cls, channel: Channel) -> PoolClient:
        """Return the client in an xdist worker; the pool is at the other end of `channel`."""
        client = cls(lambda message: channel.send(dumps(message)))
        channel.setcallback(client._receive, endmarker=None)
        return client

    def warm(self) -> None:
        """Start the fork server, since tests that need ranks are being collected."""
        self._send(WarmServer())

    def acquire(self, demand: WorldDemand, timeout: float | None) -> WorldGrant:
        """Wait for a world, or a lease without one, and return it; wait for its devices at most `timeout` seconds.

        Raise :class:`PoolError` if the pool cannot provide that.
        """
        number, answers = self._expect()
        self._send(SubmitDemand(number, demand))
        return self._wait_for_world(number, answers, timeout)

    def release(self, world: int, kill_reason: str | None, noticed: frozenset[int], retire: bool) -> None:
        """Return a world to the pool; see :meth:`Pool.release`."""
        self._wanted.discard(world)
        self._send(ReleaseWorld(world, kill_reason, noticed, retire))

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        """Return the exit status of a dead rank, or None if it is unknown after `timeout` seconds."""
        number, answers = self._expect()
        self._send(WatchExit(number, world, rank))
        try:
            end = answers.get(timeout=timeout)
        except Empty:
            return None
        return end if isinstance(end, RankExit) else None

    def wanted(self, world: int) -> bool:
        """Return True if another request waits for the devices or slots of `world`."""
        return world in self._wanted

    def record_interrupted(self, world: int, test: str) -> None:
        """Report an interrupt while `world` runs `test`; see :meth:`Pool.record_interrupted`."""
        self._send(InterruptedTest(world, test))

    def show(self, line: str) -> None:
        """Write a line to the session's terminal."""
        self._send(ShowLine(line))

    def usage_error(self, text: str) -> None:
        """End the session with `text`, because a test requests something impossible."""
        self._send(EndWithUsageError(text))

    def handle(self, message: PoolMessage) -> None:
        """Handle a message of the pool; any thread may call this."""
        if isinstance(message, WorldWanted):
            self._wanted.add(message.world)
            return
        if isinstance(message.value, WorldGrant):  # A notice of its last use may have come after its return.
            self._wanted.discard(message.value.spec.world)
        with self._lock:
            answers = self._answers.pop(message.number, None)
            if answers is not None:
                answers.put(message.value)
        if answers is None and isinstance(message.value, WorldGrant):
            self._release_unused(message.value)

    def _wait_for_world(self, number: int, answers: _Answers, timeout: float | None) -> WorldGrant:
        """Wait for the answer to a request for a world; `timeout` limits the wait for devices, not that for the ranks.

        A line shows what a long wait is for. If the wait is interrupted, the request is cancelled, and a world that the
        pool grants at that moment is returned.
        """
        began = monotonic()
        waited, show_at, limit = 0.0, WAITING_SHOWN_AFTER, math.inf if timeout is None else timeout
        try:
            while True:
                with suppress(Empty):
                    answer = answers.get(timeout=max(0.0, min(show_at, limit) - waited))
                    break
                waited = monotonic() - began
                if waited >= limit:
                    self._send(FailIfWaiting(number, f"no devices came free within {timeout:g} s (--accel-wait)"))
                    limit = math.inf
                elif waited >= show_at:
                    self._send(ShowWaiting(number, waited))
                    show_at = waited + WAITING_SHOWN_AGAIN
        except KeyboardInterrupt:
            raise  # The session ends; the controller cancels the request after showing what it waited for.
        except BaseException:
            self._cancel(number)
            with suppress(Empty):
                granted = answers.get_nowait()
                if isinstance(granted, WorldGrant):
                    self._release_unused(granted)
            raise
        if isinstance(answer, PoolError):
            raise answer
        assert isinstance(answer, WorldGrant)
        return answer

    def _cancel(self, number: int) -> None:
        """Cancel a request for a world. If its answer is on its way, `handle` returns the world."""
        with self._lock:
            self._answers.pop(number, None)
        self._send(CancelRequest(number))

    def _release_unused(self, granted: WorldGrant) -> None:
        """Return a world that nobody waits for any more."""
        self.release(granted.spec.world, "its driver has stopped waiting for it", frozenset(), False)

    def _expect(self) -> tuple[int, _Answers]:
        """Return the number of a new request, and the queue that gets its answer."""
        self._last_number += 1
        answers = self._answers[self._last_number] = SimpleQueue()
        return self._last_number, answers

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            self._fail("the main pytest process has ended")
            return
        try:
            self.handle(loads(data))
        except BaseException:  # execnet would close the channel without a message.
            self._fail(f"an answer of the main pytest process could not be handled:\n{format_exc()}")
            raise

    def _fail(self, why: str) -> None:
        for answers in list(self._answers.values()):
            answers.put(PoolError(why))


def waiting_line(waiting: str, seconds: float | None = None) -> str:
    """Return the line that shows a waiting test to the user; `waiting` is the result of :meth:`Pool.waiting`."""
    return f"accel: {waiting if seconds is None else waiting_text(waiting, seconds)}"


def waiting_text(waiting: str, seconds: float) -> str:
    """Return the text about a test that has waited for `seconds`; `waiting` is the result of :meth:`Pool.waiting`."""
    return f"{waiting} (for {seconds:.0f} s now)"
