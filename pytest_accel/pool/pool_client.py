"""The conversation between drivers and the pool: the messages, and the client by which a driver exchanges them.

Drivers in the controller and in xdist workers send the same messages. In the controller, the objects are passed on;
between processes, `messages/struct_messages.py` serializes them. The pool's end is in `pool.py`; that of a worker's
conversation is in `xdist_hooks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition
from traceback import format_exc
from typing import TYPE_CHECKING

from msgspec import Struct

from pytest_accel.core.world_key import WorldKey
from pytest_accel.forkserver.server_messages import RankExited
from pytest_accel.leases.demand import Holder, WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.rank_messages import RankExit
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.world_spec import WorldSpec

if TYPE_CHECKING:
    from execnet import Channel


@dataclass(frozen=True, slots=True)
class WorldGrant:
    """The answer to a driver that gets a world, or a lease without ranks (`WorldKey.ranks`)."""

    spec: WorldSpec
    """The world; for a lease without ranks, the number, key and devices of the lease."""
    pids: tuple[int, ...]
    directory: str
    warm: bool
    """True if a driver has had the world before."""
    waited: float
    """Seconds that the request waited for devices or CPU slots."""
    hosts: tuple[str, ...]
    """The names of the machines of the ranks, each once."""


# Driver to pool


class WarmServer(Struct, frozen=True, tag=True):
    """Start the fork server."""


class CancelDemand(Struct, frozen=True, tag=True):
    """Cancel a demand, without an answer, or take back the world that it has got."""

    number: int


class GiveBackWorld(Struct, frozen=True, tag=True):
    """Give back a world, or a lease without ranks; see `Pool.give_back`."""

    world: int
    kill_reason: str | None = None
    noticed: frozenset[int] = frozenset()
    retire: bool = False
    interrupted: str | None = None
    """The test during which the session was interrupted, empty if it is unknown; None without an interrupt."""


class ShowLine(Struct, frozen=True, tag=True):
    """Write a line of an xdist worker to the terminal."""

    line: str


PoolRequest = WarmServer | WorldDemand | CancelDemand | GiveBackWorld
DriverMessage = PoolRequest | ShowLine

# Pool to driver


class Answer(Struct, frozen=True, tag=True):
    """The answer to the :class:`WorldDemand` with the same `number`."""

    number: int
    value: WorldGrant | str
    """The text says why the pool cannot provide a world."""


class WorldWanted(Struct, frozen=True, tag=True):
    """Another request waits for the devices or slots of `world`."""

    world: int


PoolMessage = Answer | WorldWanted | RankExited
"""`RankExited` is about a rank of a world that the driver has, or will get."""

# The driver's end


class PoolClient:
    """A driver's access to the pool: it sends messages to the pool, and gets the answers."""

    def __init__(self, send: Callable[[DriverMessage], None]) -> None:
        """`send` sends a message to the pool."""
        self._send = send
        self._changed = Condition()
        """Held for each change of the attributes below."""
        self._answers: SimpleQueue[WorldGrant | str] = SimpleQueue()
        """Gets the answer to the last demand."""
        self._last_number = 0
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

    def acquire(self, key: WorldKey, test: str) -> WorldGrant:
        """Wait for a world, or a lease without ranks, and return it.

        Raise :class:`PlaceError` if the pool cannot provide it. If the wait is interrupted, the demand is cancelled.
        """
        with self._changed:
            self._last_number = number = self._last_number + 1
            self._answers = SimpleQueue()
        try:
            self._send(WorldDemand(key, Holder.here(test), number))
            answer = self._answers.get()
        except KeyboardInterrupt:
            raise  # The session ends; the controller cancels the request after showing what it waited for.
        except BaseException:  # For example the timeout of another plugin.
            self._send(CancelDemand(number))
            raise
        if isinstance(answer, str):
            raise PlaceError(answer)
        return answer

    def give_back(self, returned: GiveBackWorld) -> None:
        """Give a world back to the pool; see :meth:`Pool.give_back`."""
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
        """Write a line to the terminal, which is the controller's; only an xdist worker has to ask for it."""
        self._send(ShowLine(line))

    def handle(self, message: PoolMessage) -> None:
        """Handle a message of the pool; any thread may call this."""
        with self._changed:
            match message:
                case WorldWanted(world):
                    self._wanted.add(world)
                case RankExited(world, rank, end):
                    self._exits[world, rank] = end
                    self._changed.notify_all()
                case Answer(number, value):
                    if isinstance(value, WorldGrant):  # Forget notices about its last use.
                        self._wanted.discard(value.spec.world)
                    if number == self._last_number:  # Else the demand was cancelled.
                        self._answers.put(value)

    def _receive(self, data: bytes | None) -> None:
        if data is None:
            self._answers.put("the main pytest process has ended")
            return
        try:
            self.handle(decode(data, PoolMessage))
        except BaseException:  # execnet would close the channel without a message.
            self._answers.put(f"an answer of the main pytest process could not be handled:\n{format_exc()}")
            raise
