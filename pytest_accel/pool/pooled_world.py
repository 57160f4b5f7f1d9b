"""The states of a world in the pool, the transitions between them, and the request that a world serves."""

from __future__ import annotations

from asyncio import Future, Task, get_running_loop
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pytest_accel.core.clock import monotonic
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.rank_exit import RankExit
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pool_messages import PoolError, WorldGrant
from pytest_accel.pool.starter import Starter, Taken

RETIRE_TIMEOUT = 10.0
"""Seconds that the ranks of a retired world have to tear down their session fixtures."""
QUIET_TIMEOUT = 5.0
"""The same for ranks that have failed their test after a timeout, or torn down their fixtures before."""


class WantedObserver(Protocol):
    """The pool's view of a driver."""

    def on_wanted(self, world: int) -> None:
        """Note that another request waits for what `world`, which this driver has, holds."""


@dataclass(slots=True, eq=False)
class WorldRequest:
    """A driver's request for a world; it lives on as part of the world until the driver returns it."""

    id: int
    demand: WorldDemand
    driver: WantedObserver
    answer: Callable[[WorldGrant | PoolError], None]
    task: Task[None] | None = None
    """The task that provides the world; None once it has its answer."""
    starter: Starter[Any] | None = None
    """The starter of whose devices or slots the task waits for; None while it waits for none."""
    late: str | None = None
    """Why the request fails as soon as it has to wait; None: it may wait."""
    since: float = field(default_factory=monotonic)
    waited: float | None = None
    """Seconds until the request had its devices or CPU slots; None while it has none."""

    def end_wait(self) -> float:
        """Note that the request has its devices or CPU slots, unless that is known; return :attr:`waited`."""
        if self.waited is None:
            self.waited = monotonic() - self.since
        return self.waited


class WorldState(Enum):
    """The states of a :class:`PooledWorld`."""

    STARTING = "starting"
    """The processes are being started; `request` is the request that gets the world."""
    IN_USE = "in use"
    """A driver has the world; `request` is the driver's, or None while the world passes from one driver to another."""
    IDLE = "idle"
    """The ranks wait for the next driver."""
    RETIRING = "retiring"
    """The ranks tear down their session fixtures; errors in this are reported."""
    KILLED = "killed"
    """The processes were told to exit or are being killed; how they exit is not reported."""
    GONE = "gone"
    """The processes have ended, and what was taken for them has been returned."""


_LIVE = tuple(state for state in WorldState if state is not WorldState.GONE)


class PooledWorld:
    """One world: its state, the request that it serves, what was taken for it, and the exits of its ranks.

    The attributes are changed by the methods of this class only. A method raises RuntimeError if the state does not
    allow its transition::

        STARTING ──► IN_USE ◄──► IDLE
                       │          │
                       └──────────┴──► RETIRING

        each of these ──► KILLED, and each state ──► GONE
    """

    def __init__(self, spec: WorldSpec, request: WorldRequest, starter: Starter[Any], taken: Taken) -> None:
        self.spec = spec
        self.starter = starter
        self.state = WorldState.STARTING
        self.request: WorldRequest | None = request
        self.driver = request.driver
        """The last driver that has got the world."""
        self.taken: Taken | None = taken
        """What was taken for it; None while an idle world has no CPU slots."""
        self.keeps = starter.keeps(spec.key)
        """True if it has this as long as it has processes; False: as long as it runs a test."""
        self.pids: tuple[int, ...] = ()
        self.start: Future[None] = get_running_loop().create_future()
        """Done once the processes have started, or cannot be started any more."""
        self.exits: dict[int, RankExit] = {}
        """The exit status of each rank that has ended."""
        self.ticks_after_kill = 0
        """Ticks since the processes were to be killed. The time that a stopped controller loses does not count."""
        self.since = monotonic()
        """Time at which the start of the processes began, or of the last return by a driver."""
        self.retire_deadline: float | None = None
        """Time at which the ranks of a retired world are killed if their sessions have not ended; else None."""
        self.stacks: dict[int, str] = {}
        """Stacks of the ranks that still run shortly before a retiring world is killed."""
        self._forced_exit: RankExit | None = None
        self._exit_callbacks: list[tuple[int, Callable[[RankExit | None], None]]] = []

    @property
    def wanted(self) -> bool:
        """True if another request waits for what the world has."""
        return self.taken is not None and self.taken.wanted

    @property
    def ended(self) -> bool:
        """True if every rank has ended."""
        return len(self.exits) == self.spec.ranks

    @property
    def ending(self) -> bool:
        """True if the world can run no further test, but has processes."""
        return self.state in (WorldState.RETIRING, WorldState.KILLED)

    @property
    def alive(self) -> dict[int, int]:
        """The process id of each rank that has not ended."""
        return {rank: pid for rank, pid in enumerate(self.pids) if rank not in self.exits}

    def hand_over(self, request: WorldRequest) -> None:
        """Give the world to the driver of `request`."""
        if self.state is WorldState.IN_USE and self.request is not None:
            raise RuntimeError(f"world {self.spec.world} cannot be handed over: another driver has it")
        self._change(WorldState.IN_USE, WorldState.STARTING, WorldState.IDLE, WorldState.IN_USE)
        self.request, self.driver = request, request.driver

    def take_slots(self, taken: Taken) -> None:
        """Have `taken`, the CPU slots of the next test of an idle world."""
        self._change(WorldState.IDLE, WorldState.IDLE)
        self.taken = taken

    def drop(self) -> Taken | None:
        """Return what was taken for the world, which has it no more, in any state; None if there is nothing."""
        taken, self.taken = self.taken, None
        return taken

    def take_back(self) -> None:
        """Take the world from its driver. Another transition must follow."""
        self._change(WorldState.IN_USE, WorldState.IN_USE)
        self.request = None

    def make_idle(self) -> None:
        """Keep the world warm for the next driver."""
        self._change(WorldState.IDLE, WorldState.IN_USE)
        self.request, self.since = None, monotonic()

    def retire(self, *, quietly: bool = False) -> None:
        """Give the ranks time to end their sessions; with `quietly`, errors in this are not reported."""
        self._change(WorldState.KILLED if quietly else WorldState.RETIRING, WorldState.IDLE, WorldState.IN_USE)
        self.request, self.retire_deadline = None, monotonic() + RETIRE_TIMEOUT

    def record_stacks(self, stacks: Mapping[int, str]) -> None:
        """Record where the ranks of a retiring world are."""
        self.stacks.update(stacks)

    def kill(self) -> None:
        """Record that the processes are being killed. A killed world may be killed again: the session's end does it."""
        self._change(WorldState.KILLED, *_LIVE)

    def revoke(self, forced_exit: RankExit) -> None:
        """Record that the processes are being killed while a driver has the world, which is to return it.

        Each rank then has `forced_exit` instead of its own exit status.
        """
        self._change(WorldState.IN_USE, WorldState.IN_USE)
        self._forced_exit = forced_exit

    def watch_exit(self, rank: int, on_exit: Callable[[RankExit | None], None]) -> None:
        """Call `on_exit` with the exit status of `rank` once it has ended; with None if the world is gone before."""
        if rank in self.exits:
            on_exit(self.exits[rank])
        elif self.state is WorldState.GONE:
            on_exit(None)
        else:
            self._exit_callbacks.append((rank, on_exit))

    def rank_exited(self, rank: int, end: RankExit) -> None:
        """Record the exit of a rank and report it to its watchers; no-op if an exit of the rank is recorded."""
        if rank in self.exits:
            return
        end = self.exits[rank] = self._forced_exit or end
        for entry in [entry for entry in self._exit_callbacks if entry[0] == rank]:
            self._exit_callbacks.remove(entry)
            entry[1](end)

    def tick(self) -> None:
        """Count a tick if the processes were to be killed before."""
        if self.ending and (self.retire_deadline is None or self.retire_deadline < monotonic()):
            self.ticks_after_kill += 1

    def gone(self) -> None:
        """Record that no process is left. Watchers of ranks without a recorded exit get None."""
        self._change(WorldState.GONE, *_LIVE)
        callbacks, self._exit_callbacks = self._exit_callbacks, []
        for _, on_exit in callbacks:
            on_exit(None)

    def _change(self, to: WorldState, *allowed: WorldState) -> None:
        if self.state not in allowed:
            expected = " or ".join(state.value for state in allowed)
            raise RuntimeError(f"world {self.spec.world} is {self.state.value}; it must be {expected} to be {to.value}")
        self.state = to
