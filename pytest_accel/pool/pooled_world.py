"""The states of a world in the pool, the request that it serves, and the errors of worlds that belong to no test."""

from __future__ import annotations

from asyncio import Future, Task, get_running_loop
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from pytest_accel.core.clock import RETIRE_TIMEOUT, monotonic
from pytest_accel.core.truncation import LAST_OUTPUT
from pytest_accel.diagnostics.collectives import waiting_in
from pytest_accel.diagnostics.diagnosis import Examiner, Interrupted, OutsideError, RankProblem
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.diagnostics.python_stacks import frames_of_rank, split_fault, where
from pytest_accel.forkserver.server_messages import RankExited
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.rank_messages import RankExit, When
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pool_client import PoolMessage
from pytest_accel.pool.starter import Starter, Taken


class PoolDriver(Protocol):
    """A driver, as the pool sees it."""

    def handle(self, message: PoolMessage) -> None:
        """Handle a message, or send it to the driver."""


@dataclass(slots=True, eq=False)
class WorldRequest:
    """A driver's request for a world, and then a part of the world until the driver gives the world back."""

    id: int
    demand: WorldDemand
    driver: PoolDriver
    show_at: float
    """Seconds after which a line shows what the request waits for."""
    task: Task[None] | None = None
    """The task that provides the world; None once it has its answer."""
    starter: Starter[Any] | None = None
    """The starter for whose devices or slots the task waits; None while the task does not wait for a starter."""
    since: float = field(default_factory=monotonic)
    waited: float | None = None
    """Seconds until the request had its devices or CPU slots; None before that."""

    def waits_for(self) -> tuple[str, list[str]] | None:
        """Return what the task waits for and why, as `LeaseSource.waiting` does; None if it waits for no lease."""
        return None if self.starter is None else self.starter.leases.waiting(self.demand)

    def waiting(self) -> str | None:
        """Return a line with the test, the lease that it waits for and the reasons; None if it waits for no lease."""
        if (found := self.waits_for()) is None:
            return None
        what, obstacles = found
        return ": ".join(filter(None, (f"{self.demand.holder.test} waits for {what}", "; ".join(obstacles))))


class WorldState(Enum):
    """The states of a :class:`PooledWorld`."""

    STARTING = "starting"
    """The processes are being started; `request` is the request that gets the world."""
    IN_USE = "in use"
    """The driver of `request` has the world."""
    IDLE = "idle"
    """The ranks wait for the next driver."""
    RETIRING = "retiring"
    """The ranks tear down their session fixtures; errors in this are reported."""
    KILLED = "killed"
    """The processes were told to exit or are being killed; how they exit is not reported."""
    GONE = "gone"
    """The processes have ended, and their devices or CPU slots have been given back."""


_STARTING, _IN_USE, _IDLE, _RETIRING, _KILLED, _GONE = WorldState
NEXT = {
    _STARTING: {_IN_USE, _KILLED, _GONE},
    _IN_USE: {_IN_USE, _IDLE, _RETIRING, _KILLED, _GONE},
    _IDLE: {_IN_USE, _RETIRING, _KILLED, _GONE},
    _RETIRING: {_KILLED, _GONE},
    _KILLED: {_KILLED, _GONE},
    _GONE: set[WorldState](),
}
"""The states that may follow each state. A world passes from one driver to the next without being idle, and a killed
world may be killed again: the end of the session does that."""


class PooledWorld:
    """One world: its state, the request that it serves, the lease that was taken for it, and the exits of its ranks.

    A lease that a driver's own process uses is a world without ranks. The pool sets all attributes except `state`.
    """

    def __init__(self, spec: WorldSpec, request: WorldRequest, starter: Starter[Any], taken: Taken) -> None:
        self.spec = spec
        self.starter = starter
        self.state = WorldState.STARTING
        self.request: WorldRequest | None = request
        self.driver = request.driver
        """The last driver that has got the world."""
        self.taken: Taken | None = taken
        """The lease of the world; None while an idle world has no CPU slots."""
        self.keeps = starter.keeps(spec.key)
        """True if the world has `taken` as long as it has processes; False if only while it runs a test."""
        self.pids: tuple[int, ...] = ()
        self.start: Future[None] = get_running_loop().create_future()
        """Done once the processes have started, or cannot be started any more."""
        self.exits: dict[int, RankExit] = {}
        """The exit status of each rank that has ended."""
        self.since = monotonic()
        """Time of the last change of `state`."""
        self.forced_exit: RankExit | None = None
        """The exit to record for each rank that ends from now on; None to record the rank's own exit."""

    @property
    def wanted(self) -> bool:
        """True if another request waits for the lease of the world."""
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

    def become(self, state: WorldState) -> None:
        """Change the state. Raise RuntimeError if `state` must not follow the present state (`NEXT`)."""
        if state not in NEXT[self.state]:
            raise RuntimeError(f"world {self.spec.world} is {self.state.value}, and cannot be {state.value} next")
        self.state, self.since = state, monotonic()

    def drop(self) -> Taken | None:
        """Remove and return the lease of the world, or return None if it has none."""
        taken, self.taken = self.taken, None
        return taken

    def rank_exited(self, rank: int, end: RankExit) -> None:
        """Record the exit of a rank, and report it to the driver; no-op if an exit of the rank is recorded."""
        if rank not in self.exits:
            self.exits[rank] = self.forced_exit or end
            if self.request is not None:
                self.request.driver.handle(RankExited(self.spec.world, rank, self.exits[rank]))


class PoolSummary:
    """Errors that belong to no test, notes, and the tests that were interrupted. Owned by the pool."""

    def __init__(self, directory: str) -> None:
        """`directory` is the session's private folder."""
        self.errors: list[str | RankProblem] = []
        """Errors that belong to no test, such as an error in the teardown of a session fixture."""
        self.notes: list[str] = []
        """Lines to show with ``-v``."""
        self.interrupted: dict[int, Interrupted] = {}
        """The tests that ran when the session was interrupted, by world number."""
        self._directory = directory

    def add_interrupted(self, world: PooledWorld, test: str) -> None:
        """Record where the ranks of a world are in an interrupted session; a later call only adds the test.

        An empty `test` means that the test is unknown. No record is made if the world then proves to be between tests.
        """
        recorded = self.interrupted.get(world.spec.world)
        if recorded is not None:
            if test and not recorded.test:
                self.interrupted[world.spec.world] = replace(recorded, test=test)
            return
        ends = dict(world.exits)
        examiner = Examiner(self._directory, world.spec)
        stacks, findings = examiner.hung(world.alive, world.alive)
        idle = all(stack and where(frames_of_rank(stack)) is None for stack in stacks.values())
        between_tests = not test and not ends and idle
        if between_tests and not any(waiting_in(record) for record in findings.records.values()):
            return
        self.interrupted[world.spec.world] = Interrupted(test, ends, stacks, findings)

    def add_problem(
        self, error: OutsideError, world: PooledWorld, rank: int, end: RankExit | None = None, *, stack: str = ""
    ) -> None:
        """Add an error of a rank, with its log; `end` is the rank's exit if that is the error."""
        inspector = WorldInspector(self._directory, world.spec)
        phases: dict[int, When] = {rank: "teardown"}
        sections = inspector.ask(MachineInspector.captured, phases).get(rank, [])
        if end is not None and end.is_crash:
            sections, stack = split_fault(sections)
        output = "\n".join(text.strip("\n") for _, text in sections)[-LAST_OUTPUT:]
        self.errors.append(RankProblem(error, rank, world.spec.ranks, end, RETIRE_TIMEOUT, stack, output))
