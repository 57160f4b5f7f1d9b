"""The driver's access to the pool: directly in the controller, over an execnet channel in an xdist worker."""

from __future__ import annotations

import contextlib
import math
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pytest_accel.core.clock import monotonic
from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.records import Grant, PoolError

WAITING_SHOWN_AFTER = 5.0
"""Seconds that a test waits before a line shows what it waits for; shorter waits are normal."""
WAITING_SHOWN_AGAIN = 60.0
"""Seconds until the line is shown again."""


class Port(Protocol):
    """The pool's methods for a driver. :meth:`acquire` and :meth:`rank_exit` block, the others do not."""

    def warm(self) -> None:
        """Start the fork server, since tests that need ranks are being collected."""

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the fork server import `modules`, which collection has imported."""

    def import_nothing_ahead(self, why: str) -> None:
        """Tell the pool that an import finder may change modules; see :meth:`Pool.import_nothing_ahead`."""

    def keep_out(self, modules: tuple[str, ...]) -> None:
        """Tell the pool which modules an import finder has changed; see :meth:`Pool.keep_out`."""

    def acquire(self, key: WorldKey, holder: Holder, timeout: float | None) -> Grant:
        """Wait for a world of `key` and return it; wait for its devices at most `timeout` seconds.

        Raise :class:`PoolError` if the pool cannot provide the world.
        """

    def release(self, world: int, harm: str | None, noticed: frozenset[int], worn: bool) -> None:
        """Return a world to the pool; see :meth:`Pool.release`."""

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        """Return the exit status of a dead rank, or None if it is unknown after `timeout` seconds."""

    def wanted(self, world: int) -> bool:
        """Return True if another request waits for the devices or slots of `world`."""

    def look_at_interrupted(self, world: int, test: str) -> None:
        """Report an interrupt while `world` runs `test`; see :meth:`Pool.look_at_interrupted`."""

    def show(self, line: str) -> None:
        """Write a line to the session's terminal."""

    def usage_error(self, text: str) -> None:
        """End the session with `text`, because a test requests something impossible."""


class _WantedWorlds:
    """The worlds whose devices or slots another request waits for; the base class of both ports."""

    def __init__(self) -> None:
        self._wanted: set[int] = set()

    def wanted(self, world: int) -> bool:
        return world in self._wanted

    def on_wanted(self, world: int) -> None:
        self._wanted.add(world)


def _receive(
    answers: queue.SimpleQueue[Any],
    timeout: float | None,
    show: Callable[[float], None],
    withdraw: Callable[[str], None],
    give_up: Callable[[], None],
) -> Grant:
    """Wait for the answer to a request for a world; `timeout` limits the wait for devices, not the start of the ranks.

    ``show(seconds)`` is called when a long wait should be shown to the user.
    """
    began = monotonic()
    show_at, limit = WAITING_SHOWN_AFTER, math.inf if timeout is None else timeout
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=max(0.0, min(show_at, limit) - (monotonic() - began)))
                break
            waited = monotonic() - began
            if waited >= limit:
                withdraw(f"no devices came free within {timeout:g} s (--accel-wait)")
                limit = math.inf
            elif waited >= show_at:
                show(waited)
                show_at = waited + WAITING_SHOWN_AGAIN
    except KeyboardInterrupt:
        raise  # The session ends; the controller withdraws the request after showing what it waited for.
    except BaseException:
        give_up()
        raise
    if isinstance(answer, PoolError):
        raise answer
    assert isinstance(answer, Grant)
    return answer


def waiting_line(waiting: str, seconds: float | None = None) -> str:
    """Return the line that shows a waiting test to the user; `waiting` is the result of :meth:`Pool.waiting`."""
    return f"accel: {waiting}" + ("" if seconds is None else f" (for {seconds:.0f} s now)")


class LocalPort(_WantedWorlds):
    """A port to a pool in this process."""

    def __init__(self, pool: Pool, show: Callable[[str], None]) -> None:
        """`show` writes a line to the terminal."""
        super().__init__()
        self._pool = pool
        self.show = show
        self.look_at_interrupted = pool.look_at_interrupted
        self.warm = pool.warm
        self.preload = pool.preload
        self.import_nothing_ahead = pool.import_nothing_ahead
        self.keep_out = pool.keep_out
        self.release = pool.release

    def acquire(self, key: WorldKey, holder: Holder, timeout: float | None) -> Grant:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        ticket = self._pool.acquire(key, holder, self, answers.put)

        def show(seconds: float) -> None:
            if (waiting := self._pool.waiting(ticket)) is not None:
                self.show(waiting_line(waiting, seconds))

        return _receive(
            answers, timeout, show, lambda why: self._pool.withdraw(ticket, why), lambda: self._pool.cancel(ticket)
        )

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        answers: queue.SimpleQueue[RankExit | None] = queue.SimpleQueue()
        self._pool.watch_exit(world, rank, answers.put)
        try:
            return answers.get(timeout=timeout)
        except queue.Empty:
            return None

    def usage_error(self, text: str) -> None:
        import pytest

        raise pytest.UsageError(text)


class Channel(Protocol):
    """The methods of `execnet.Channel` that are used here."""

    def send(self, item: object) -> None: ...

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None: ...


class RemotePort(_WantedWorlds):
    """A port in an xdist worker to the pool in the controller, at the other end of `channel`."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._last_number = 0
        channel.setcallback(self._receive, endmarker=None)

    def warm(self) -> None:
        self._send("warm")

    def preload(self, modules: tuple[str, ...]) -> None:
        self._send("preload", modules)

    def import_nothing_ahead(self, why: str) -> None:
        self._send("import nothing ahead", why)

    def keep_out(self, modules: tuple[str, ...]) -> None:
        self._send("keep out", modules)

    def acquire(self, key: WorldKey, holder: Holder, timeout: float | None) -> Grant:
        number, answers = self._expect()
        self._send("acquire", number, key, holder)
        return _receive(
            answers,
            timeout,
            lambda seconds: self._send("show", number, seconds),
            lambda why: self._send("withdraw", number, why),
            lambda: self._send("cancel", number),
        )

    def release(self, world: int, harm: str | None, noticed: frozenset[int], worn: bool) -> None:
        self._wanted.discard(world)
        self._send("release", world, harm, noticed, worn)

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        number, answers = self._expect()
        self._send("exit", number, world, rank)
        try:
            end = answers.get(timeout=timeout)
        except queue.Empty:
            return None
        return end if isinstance(end, RankExit) else None

    def look_at_interrupted(self, world: int, test: str) -> None:
        self._send("interrupted", world, test)

    def show(self, line: str) -> None:
        self._send("line", line)

    def usage_error(self, text: str) -> None:
        self._send("usage", text)

    def _expect(self) -> tuple[int, queue.SimpleQueue[Any]]:
        """Return the number of a new request, and the queue that gets its answer."""
        with self._lock:
            self._last_number += 1
            answers = self._answers[self._last_number] = queue.SimpleQueue()
            return self._last_number, answers

    def _send(self, *message: object) -> None:
        self._channel.send(pickle.dumps(message))

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            self._fail("the main pytest process has ended")
            return
        try:
            self._handle(data)
        except BaseException:  # execnet would close the channel without a message.
            self._fail(f"an answer of the main pytest process could not be handled:\n{traceback.format_exc()}")
            raise

    def _fail(self, why: str) -> None:
        for answers in list(self._answers.values()):
            answers.put(PoolError(why))

    def _handle(self, data: bytes) -> None:
        kind, *values = pickle.loads(data)
        if kind == "wanted":
            self.on_wanted(values[0])
        else:
            number, answer = values
            if number in self._answers:
                self._answers.pop(number).put(answer)


class PoolService:
    """The controller's end of one xdist worker's channel.

    The callbacks run in execnet's receiver thread, so they must be short.
    """

    def __init__(
        self,
        pool: Callable[[], Pool],
        channel: Channel,
        on_usage_error: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """`pool` returns the pool, creating it at the first call, which is when a worker first needs it.

        `show` writes a line to the terminal.
        """
        self._get_pool = pool
        self._channel = channel
        self._on_usage_error = on_usage_error
        self._show = show
        self._used = False
        self._tickets: dict[int, int] = {}
        channel.setcallback(self._receive, endmarker=None)

    @property
    def _pool(self) -> Pool:
        self._used = True
        return self._get_pool()

    def on_wanted(self, world: int) -> None:
        self._send("wanted", world)

    def _send(self, *message: object) -> None:
        with contextlib.suppress(OSError):  # The worker has ended; the end marker follows.
            self._channel.send(pickle.dumps(message))

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            if self._used:
                with self._failing():
                    self._pool.driver_lost(self)
            return
        with self._failing():
            kind, *values = pickle.loads(data)
            with self._failing(values[0] if kind in ("acquire", "exit") else None):
                self._handle(kind, values)

    @contextlib.contextmanager
    def _failing(self, number: int | None = None) -> Iterator[None]:
        """On error, answer the worker's request `number` with it and fail the pool; execnet would hide the error."""
        try:
            yield
        except BaseException:
            why = f"a request of an xdist worker has ended with an error:\n{traceback.format_exc()}"
            if number is not None:
                self._answer(number, PoolError(why))
            self._pool.fail(why)

    def _handle(self, kind: str, values: list[Any]) -> None:
        if kind == "acquire":
            number, key, holder = values
            self._tickets[number] = self._pool.acquire(key, holder, self, lambda answer: self._answer(number, answer))
        elif kind == "show":
            number, seconds = values
            if (waiting := self._pool.waiting(self._tickets.get(number, 0))) is not None:
                self._show(waiting_line(waiting, seconds))
        elif kind == "withdraw":
            self._pool.withdraw(self._tickets.get(values[0], 0), values[1])
        elif kind == "cancel":
            self._pool.cancel(self._tickets.pop(values[0], 0))
        elif kind == "release":
            self._pool.release(*values)
        elif kind == "interrupted":
            self._pool.look_at_interrupted(*values)  # Slow, but the session is ending.
        elif kind == "line":
            self._show(values[0])
        elif kind == "exit":
            number, world, rank = values
            self._pool.watch_exit(world, rank, lambda end: self._answer(number, end))
        elif kind == "warm":
            self._pool.warm()
        elif kind == "preload":
            self._pool.preload(values[0])
        elif kind == "import nothing ahead":
            self._pool.import_nothing_ahead(values[0])
        elif kind == "keep out":
            self._pool.keep_out(values[0])
        elif kind == "usage":
            self._on_usage_error(values[0])

    def _answer(self, number: int, value: object) -> None:
        self._tickets.pop(number, None)
        self._send("answer", number, value)
