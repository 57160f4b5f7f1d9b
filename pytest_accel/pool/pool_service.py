"""The pool's end of its conversation with drivers: answers their messages (`pool_messages.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pickle import dumps, loads
from traceback import format_exc

from pytest_accel.pool.pool import Pool
from pytest_accel.pool.pool_client import Channel, PoolClient, Value, waiting_line
from pytest_accel.pool.pool_messages import (
    Answer,
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
    WorldWanted,
)


class PoolService:
    """Answers the messages of one driver.

    Those of an xdist worker arrive in execnet's receiver thread, so the methods must be short.
    """

    def __init__(
        self,
        pool: Callable[[], Pool],
        send: Callable[[PoolMessage], None],
        on_usage_error: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """`pool` returns the pool, creating it at the first call, which is when a worker first needs it.

        `send` sends a message to the driver. `show` writes a line to the terminal.
        """
        self._get_pool = pool
        self._send = send
        self._on_usage_error = on_usage_error
        self._show = show
        self._used_pool: Pool | None = None
        """The pool; None if the worker has not needed it, or it could not be created."""
        self._requests: dict[int, int] = {}
        """The pool's id of each request of the driver."""

    @property
    def _pool(self) -> Pool:
        self._used_pool = self._get_pool()
        return self._used_pool

    def on_wanted(self, world: int) -> None:
        self._send(WorldWanted(world))

    def receive(self, data: bytes | None) -> None:
        """Handle a serialized message of an xdist worker; None says that the worker has ended."""
        if data is None:
            if self._used_pool is not None:
                with self._failing():
                    self._used_pool.driver_lost(self)
            return
        with self._failing():
            message: DriverMessage = loads(data)
            with self._failing(message.number if isinstance(message, (SubmitDemand, WatchExit)) else None):
                self.handle(message)

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

    def handle(self, message: DriverMessage) -> None:
        """Do what the driver asks for. An error is raised, unlike in :meth:`receive`."""
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

    def _answer(self, number: int, value: Value) -> None:
        self._requests.pop(number, None)
        self._send(Answer(number, value))


def serve(
    channel: Channel,
    pool: Callable[[], Pool],
    on_usage_error: Callable[[str], None],
    show: Callable[[str], None],
) -> PoolService:
    """Return a service of the xdist worker at the other end of `channel`, whose messages go to `receive`."""

    def send(message: PoolMessage) -> None:
        with suppress(OSError):  # The worker has ended; the end marker follows.
            channel.send(dumps(message))

    return PoolService(pool, send, on_usage_error, show)


def client_here(pool: Pool, show: Callable[[str], None]) -> PoolClient:
    """Return the client of a driver in the controller, whose messages are calls of the pool."""

    def usage_error(text: str) -> None:
        import pytest

        raise pytest.UsageError(text)

    service = PoolService(lambda: pool, lambda message: client.handle(message), usage_error, show)
    client = PoolClient(service.handle)
    return client
