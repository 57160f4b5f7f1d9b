"""How a driver reaches the pool: directly in the controller, over an execnet channel in an xdist worker."""

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
from pytest_accel.core.world_key import WorldShape
from pytest_accel.leases.locks import Holder
from pytest_accel.pool.pool import Pool
from pytest_accel.pool.records import Grant, PoolError

WAITING_SHOWN_AFTER = 5.0
"""Seconds for which a test waits before its user is told for what: shorter waits are ordinary."""
WAITING_SHOWN_AGAIN = 60.0
"""Seconds until the user is told again."""


class Port(Protocol):
    """What a driver asks of the pool. :meth:`acquire` and :meth:`exit_status` wait, the rest does not."""

    def warm(self) -> None:
        """Tests that will need ranks are being collected."""

    def preload(self, modules: tuple[str, ...]) -> None:
        """Collection has imported `modules`."""

    def import_nothing_ahead(self, why: str) -> None:
        """Tell the pool that a finder may change what is imported; see :meth:`Pool.import_nothing_ahead`."""

    def keep_out(self, modules: tuple[str, ...]) -> None:
        """Tell the pool which modules a finder has changed; see :meth:`Pool.keep_out`."""

    def acquire(self, shape: WorldShape, holder: Holder, patience: float | None) -> Grant:
        """A world of `shape`, whose devices may take `patience` seconds; :class:`PoolError` says why there is none."""

    def release(self, world: int, harm: str | None, noticed: frozenset[int], worn: bool) -> None:
        """Give a world back; see :meth:`Pool.release`."""

    def exit_status(self, world: int, rank: int, patience: float) -> int | None:
        """How a dead rank ended; None where that is not known in time."""

    def wanted(self, world: int) -> bool:
        """Whether somebody waits for what `world` holds."""

    def look_at_interrupted(self, world: int, test: str) -> None:
        """Report an interrupt while `world` runs `test`; see :meth:`Pool.look_at_interrupted`."""

    def show(self, line: str) -> None:
        """Write a line for the person at the session's terminal."""

    def usage_error(self, text: str) -> None:
        """The tests ask for what cannot be: the session ends with `text`."""


class _Waits:
    """What both ports share: waiting for answers, and the worlds that somebody waits for."""

    def __init__(self) -> None:
        self._wanted: set[int] = set()

    def wanted(self, world: int) -> bool:
        return world in self._wanted

    def on_wanted(self, world: int) -> None:
        self._wanted.add(world)


def _receive(
    answers: queue.SimpleQueue[Any],
    patience: float | None,
    show: Callable[[float], None],
    withdraw: Callable[[str], None],
    give_up: Callable[[], None],
) -> Grant:
    """Wait for the answer to a request for a world; `patience` is for the devices only, not for the start of the ranks.

    ``show(seconds)`` is called when the request has waited for so long that its user should know.
    """
    began = monotonic()
    show_at, limit = WAITING_SHOWN_AFTER, math.inf if patience is None else patience
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                answer = answers.get(timeout=max(0.0, min(show_at, limit) - (monotonic() - began)))
                break
            waited = monotonic() - began
            if waited >= limit:
                withdraw(f"no devices came free within {patience:g} s (--accel-wait)")
                limit = math.inf
            elif waited >= show_at:
                show(waited)
                show_at = waited + WAITING_SHOWN_AGAIN
    except KeyboardInterrupt:
        raise  # The session ends, and its controller withdraws the request when it has shown what it waits for.
    except BaseException:
        give_up()
        raise
    if isinstance(answer, PoolError):
        raise answer
    assert isinstance(answer, Grant)
    return answer


def waiting_line(waiting: str, seconds: float | None = None) -> str:
    """Return the line that tells the user of a test that waits; `waiting` is what :meth:`Pool.waiting` says of it."""
    return f"accel: {waiting}" + ("" if seconds is None else f" (for {seconds:.0f} s now)")


class LocalPort(_Waits):
    """The pool is in this process."""

    def __init__(self, pool: Pool, show: Callable[[str], None]) -> None:
        """`show` writes a line for the user."""
        super().__init__()
        self._pool = pool
        self.show = show
        self.look_at_interrupted = pool.look_at_interrupted
        self.warm = pool.warm
        self.preload = pool.preload
        self.import_nothing_ahead = pool.import_nothing_ahead
        self.keep_out = pool.keep_out
        self.release = pool.release

    def acquire(self, shape: WorldShape, holder: Holder, patience: float | None) -> Grant:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        ticket = self._pool.acquire(shape, holder, self, answers.put)

        def show(seconds: float) -> None:
            if (waiting := self._pool.waiting(ticket)) is not None:
                self.show(waiting_line(waiting, seconds))

        return _receive(
            answers, patience, show, lambda why: self._pool.withdraw(ticket, why), lambda: self._pool.cancel(ticket)
        )

    def exit_status(self, world: int, rank: int, patience: float) -> int | None:
        answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._pool.watch_exit(world, rank, answers.put)
        try:
            return answers.get(timeout=patience)
        except queue.Empty:
            return None

    def usage_error(self, text: str) -> None:
        import pytest

        raise pytest.UsageError(text)


class Channel(Protocol):
    """The part of `execnet.Channel` that is used."""

    def send(self, item: object) -> None: ...

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None: ...


class RemotePort(_Waits):
    """The pool is in xdist's controller, at the other end of `channel`."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._last = 0
        channel.setcallback(self._receive, endmarker=None)

    def warm(self) -> None:
        self._send("warm")

    def preload(self, modules: tuple[str, ...]) -> None:
        self._send("preload", modules)

    def import_nothing_ahead(self, why: str) -> None:
        self._send("import nothing ahead", why)

    def keep_out(self, modules: tuple[str, ...]) -> None:
        self._send("keep out", modules)

    def acquire(self, shape: WorldShape, holder: Holder, patience: float | None) -> Grant:
        number, answers = self._expect()
        self._send("acquire", number, shape, holder)
        return _receive(
            answers,
            patience,
            lambda seconds: self._send("show", number, seconds),
            lambda why: self._send("withdraw", number, why),
            lambda: self._send("cancel", number),
        )

    def release(self, world: int, harm: str | None, noticed: frozenset[int], worn: bool) -> None:
        self._wanted.discard(world)
        self._send("release", world, harm, noticed, worn)

    def exit_status(self, world: int, rank: int, patience: float) -> int | None:
        number, answers = self._expect()
        self._send("exit", number, world, rank)
        try:
            status = answers.get(timeout=patience)
        except queue.Empty:
            return None
        return status if isinstance(status, int) else None

    def look_at_interrupted(self, world: int, test: str) -> None:
        self._send("interrupted", world, test)

    def show(self, line: str) -> None:
        self._send("line", line)

    def usage_error(self, text: str) -> None:
        self._send("usage", text)

    def _expect(self) -> tuple[int, queue.SimpleQueue[Any]]:
        with self._lock:
            self._last += 1
            answers = self._answers[self._last] = queue.SimpleQueue()
            return self._last, answers

    def _send(self, *message: object) -> None:
        self._channel.send(pickle.dumps(message))

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            self._fail("the main pytest process has ended")
            return
        try:
            self._take(data)
        except BaseException:  # execnet would close the channel, and say nothing.
            self._fail(f"an answer of the main pytest process could not be handled:\n{traceback.format_exc()}")
            raise

    def _fail(self, why: str) -> None:
        for answers in list(self._answers.values()):
            answers.put(PoolError(why))

    def _take(self, data: bytes) -> None:
        kind, *values = pickle.loads(data)
        if kind == "wanted":
            self.on_wanted(values[0])
        else:
            number, answer = values
            if number in self._answers:
                self._answers.pop(number).put(answer)


class PoolService:
    """The controller's end of one worker's channel. Its callbacks run in execnet's receiver thread: they are short."""

    def __init__(
        self,
        pool: Callable[[], Pool],
        channel: Channel,
        on_usage_error: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """`pool` makes the pool when it is first called, which is when a worker first needs it.

        `show` writes a line for the user.
        """
        self._make = pool
        self._channel = channel
        self._on_usage_error = on_usage_error
        self._show = show
        self._used = False
        self._tickets: dict[int, int] = {}
        channel.setcallback(self._receive, endmarker=None)

    @property
    def _pool(self) -> Pool:
        self._used = True
        return self._make()

    def on_wanted(self, world: int) -> None:
        self._send("wanted", world)

    def _send(self, *message: object) -> None:
        with contextlib.suppress(OSError):  # The worker is gone; the end marker follows.
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
                self._take(kind, values)

    @contextlib.contextmanager
    def _failing(self, number: int | None = None) -> Iterator[None]:
        """Have an error fail what waits: the worker's request `number`, and all others. execnet would say nothing."""
        try:
            yield
        except BaseException:
            why = f"a request of an xdist worker has ended with an error:\n{traceback.format_exc()}"
            if number is not None:
                self._answer(number, PoolError(why))
            self._pool.fail(why)

    def _take(self, kind: str, values: list[Any]) -> None:
        if kind == "acquire":
            number, shape, holder = values
            self._tickets[number] = self._pool.acquire(shape, holder, self, lambda answer: self._answer(number, answer))
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
            self._pool.look_at_interrupted(*values)  # Not short, but the session ends.
        elif kind == "line":
            self._show(values[0])
        elif kind == "exit":
            number, world, rank = values
            self._pool.watch_exit(world, rank, lambda status: self._answer(number, status))
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
