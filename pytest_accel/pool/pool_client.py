"""The conversation between drivers and the pool (`pool_messages.py`), with both of its ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Condition
from traceback import format_exc
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.rank_exit import RankExit
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.pool.pool_messages import (
    Answer,
    CancelDemand,
    DriverMessage,
    GiveBackWorld,
    PoolMessage,
    RankEnded,
    ShowLine,
    WarmServer,
    WorldGrant,
    WorldWanted,
)

if TYPE_CHECKING:
    from pytest_accel.pool.pool import Pool


class Channel(Protocol):
    """The methods of `execnet.Channel` that are used here."""

    def send(self, item: object) -> None: ...

    def setcallback(self, callback: Callable[[Any], None], endmarker: object) -> None: ...


class PoolClient:
    """A driver's access to the pool. It sends the messages of `pool_messages`, and gets the answers.

    Drivers in the controller and in xdist's workers use the same messages. In the controller a message is a
    call of the pool, and in a worker it goes over execnet's channel.
    """

    def __init__(self, send: Callable[[DriverMessage], None]) -> None:
        """`send` sends a message to the pool."""
        self._send = send
        self._changed = Condition()
        """Held for each change of the attributes below."""
        self._answers: SimpleQueue[WorldGrant | str] = SimpleQueue()
        """Gets the answer to the demand that the driver waits for."""
        self._last_number = 0
        self._awaited = 0
        """The number of this demand; 0 if the driver waits for no answer."""
        self._wanted: set[int] = set()
        self._exits: dict[tuple[int, int], RankExit] = {}
        """The exits of ranks of the driver's worlds, by world and rank."""

    @classmethod
    def over(cls, channel: Channel) -> PoolClient:
        """Return the client in an xdist worker; the pool is at the other end of `channel`."""
        client = cls(lambda message: channel.send(encode(message)))
        channel.setcallback(client._receive, endmarker=None)
        return client

    def warm(self) -> None:
        """Start the fork server, since tests that need ranks are being collected."""
        self._send(WarmServer())

    def acquire(self, key: WorldKey, test: str, timeout: float | None) -> WorldGrant:
        """Wait for a world, or a lease without ranks, and return it; wait for its devices at most `timeout` seconds.

        Raise :class:`PlaceError` if the pool cannot provide it. If the wait is interrupted, the request is cancelled,
        and a world that the pool grants at that moment is given back.
        """
        with self._changed:
            self._awaited = self._last_number = number = self._last_number + 1
            self._answers = SimpleQueue()
        try:
            self._send(WorldDemand(key, Holder.here(test), number, timeout))
            answer = self._answers.get()
        except KeyboardInterrupt:
            raise  # The session ends; the controller cancels the request after showing what it waited for.
        except BaseException:
            with self._changed:
                self._awaited = 0  # If the answer is on its way, `handle` gives the world back.
            self._send(CancelDemand(number))
            with suppress(Empty):
                self._give_back_unused(self._answers.get_nowait())
            raise
        if isinstance(answer, str):
            raise PlaceError(answer)
        return answer

    def give_back(self, returned: GiveBackWorld) -> None:
        """Give a world back to the pool; see :meth:`Pool.give_back`."""
        with self._changed:
            self._wanted.discard(returned.world)
            self._exits = {key: end for key, end in self._exits.items() if key[0] != returned.world}
        self._send(returned)

    def rank_exit(self, world: int, rank: int, timeout: float) -> RankExit | None:
        """Return the exit status of a dead rank, or None if it is unknown after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: (world, rank) in self._exits, timeout)
            return self._exits.get((world, rank))

    def wanted(self, world: int) -> bool:
        """Return True if another request waits for the devices or slots of `world`."""
        return world in self._wanted

    def show(self, line: str) -> None:
        """Write a line to the session's terminal."""
        self._send(ShowLine(line))

    def usage_error(self, text: str) -> None:
        """End the session with `text`, because a test requests something impossible."""
        self._send(ShowLine(text, is_usage_error=True))

    def handle(self, message: PoolMessage) -> None:
        """Handle a message of the pool; any thread may call this."""
        unused = None
        with self._changed:
            match message:
                case WorldWanted(world):
                    self._wanted.add(world)
                case RankEnded(world, rank, end):
                    self._exits[world, rank] = end
                    self._changed.notify_all()
                case Answer(number, value):
                    if isinstance(value, WorldGrant):  # A notice about its last use may have come after its return.
                        self._wanted.discard(value.spec.world)
                    if number == self._awaited:
                        self._answers.put(value)
                    else:
                        unused = value
        if unused is not None:
            self._give_back_unused(unused)

    def _give_back_unused(self, answer: WorldGrant | str) -> None:
        """Give back a world that nobody waits for any more."""
        if isinstance(answer, WorldGrant):
            self.give_back(GiveBackWorld(answer.spec.world, "its driver has stopped waiting for it"))

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            self._fail("the main pytest process has ended")
            return
        try:
            self.handle(decode(data, PoolMessage))
        except BaseException:  # execnet would close the channel without a message.
            self._fail(f"an answer of the main pytest process could not be handled:\n{format_exc()}")
            raise

    def _fail(self, why: str) -> None:
        self._answers.put(why)


class WorkerDriver:
    """The driver of an xdist worker, whose messages arrive in execnet's receiver thread."""

    def __init__(
        self,
        channel: Channel,
        pool: Callable[[], Pool],
        on_usage_error: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """`pool` returns the pool, and creates it at the first call, when a worker first needs it.

        `show` writes a line to the terminal.
        """
        self._channel = channel
        self._get_pool = pool
        self._on_usage_error = on_usage_error
        self._show = show
        self._used_pool: Pool | None = None
        """The pool; None if the worker has not needed it, or it could not be created."""

    def handle(self, message: PoolMessage) -> None:
        with suppress(OSError):  # The worker has ended; the end marker follows.
            self._channel.send(encode(message))

    def receive(self, data: bytes | None) -> None:
        """Handle a serialized message of the worker; `data` is None if the worker has ended."""
        message: DriverMessage | None = None
        try:
            if data is not None:
                message = decode(data, DriverMessage)
                if isinstance(message, ShowLine):
                    (self._on_usage_error if message.is_usage_error else self._show)(message.line)
                else:
                    self._used_pool = self._get_pool()
                    self._used_pool.post(self._used_pool.serve, self, message)
            elif self._used_pool is not None:
                self._used_pool.post(self._used_pool.driver_lost, self)
        except BaseException:  # execnet would hide the error: answer the request with it, and fail the pool.
            why = f"a request of an xdist worker has ended with an error:\n{format_exc().rstrip()}"
            if isinstance(message, WorldDemand):
                self.handle(Answer(message.number, why))
            if self._used_pool is not None:
                self._used_pool.post(self._used_pool.broken_by, why)


def client_here(pool: Pool, show: Callable[[str], None]) -> PoolClient:
    """Return the client of a driver in the controller, whose messages are calls of the pool."""

    def send(message: DriverMessage) -> None:
        if isinstance(message, ShowLine):
            if message.is_usage_error:
                raise pytest.UsageError(message.line)
            show(message.line)
            return
        pool.post(pool.serve, client, message)
        if isinstance(message, WarmServer):
            pool.call(int)  # Wait: tests may change what a server that is started later would inherit.

    client = PoolClient(send)
    return client
