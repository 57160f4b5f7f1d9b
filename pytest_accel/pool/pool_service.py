"""The pool's end of its conversation with drivers: answers their messages (`pool_messages.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
    """Answers the messages of one driver. Those of an xdist worker arrive in execnet's receiver thread."""

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
        """The pool's id of each request of the driver. Used in the pool's thread only."""

    def on_wanted(self, world: int) -> None:
        self._send(WorldWanted(world))

    def receive(self, data: bytes | None) -> None:
        """Handle a serialized message of an xdist worker; None says that the worker has ended.

        On error, answer the worker's request with it and fail the pool; execnet would hide the error.
        """
        number = None
        try:
            if data is not None:
                message: DriverMessage = loads(data)
                number = message.number if isinstance(message, (SubmitDemand, WatchExit)) else None
                self.handle(message)
            elif self._used_pool is not None:
                self._used_pool.post(self._used_pool.driver_lost, self)
        except BaseException:
            why = f"a request of an xdist worker has ended with an error:\n{format_exc()}"
            if number is not None:
                self._send(Answer(number, PoolError(why)))
            if self._used_pool is not None:
                self._used_pool.fail(why)

    def handle(self, message: DriverMessage) -> None:
        """Do what the driver asks for, in the pool's thread except for what the terminal shows."""
        if isinstance(message, ShowLine):
            self._show(message.line)
        elif isinstance(message, EndWithUsageError):
            self._on_usage_error(message.text)
        else:
            pool = self._used_pool = self._get_pool()
            pool.post(self._serve, pool, message)

    def _serve(self, pool: Pool, message: DriverMessage) -> None:
        match message:
            case SubmitDemand(number, demand):
                self._requests[number] = pool.acquire(demand, self, lambda answer: self._answer(number, answer))
            case ShowWaiting():
                # The task of a request that has just been made begins first.
                pool.post(self._show_waiting, pool, message)
            case FailIfWaiting(number, why):
                pool.fail_if_waiting(self._requests.get(number, 0), why)
            case CancelRequest(number):
                pool.cancel(self._requests.pop(number, 0))
            case ReleaseWorld(world, kill_reason, noticed, retire):
                pool.release(world, kill_reason, noticed, retire)
            case InterruptedTest(world, test):
                pool.record_interrupted(world, test)  # Slow, but the session is ending.
            case WatchExit(number, world, rank):
                pool.watch_exit(world, rank, lambda end: self._answer(number, end))
            case WarmServer():
                pool.warm()

    def _show_waiting(self, pool: Pool, message: ShowWaiting) -> None:
        if (waiting := pool.waiting(self._requests.get(message.number, 0))) is not None:
            self._show(waiting_line(waiting, message.seconds))

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
