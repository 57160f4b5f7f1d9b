"""The worlds of a session: their states, all that changes these, and the errors of worlds that belong to no test.

Everything here is called in the pool's thread.
"""

from __future__ import annotations

import math
from asyncio import CancelledError, Future, Task, get_running_loop
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from traceback import format_exc
from typing import Any, Protocol

from pytest_accel.compat import loop_tasks
from pytest_accel.core.clock import RETIRE_TIMEOUT, START_TIMEOUT, monotonic
from pytest_accel.core.processes import kill_marked
from pytest_accel.core.record_events import Recorder
from pytest_accel.core.session_folder import server_log_path
from pytest_accel.core.threads import NoThreadError
from pytest_accel.core.truncation import LAST_OUTPUT, tail
from pytest_accel.diagnostics.collectives import waiting_in
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.diagnostics.outside_errors import Interrupted, OutsideError, RankProblem
from pytest_accel.diagnostics.python_stacks import frames_of_rank, where
from pytest_accel.forkserver.server_messages import RankExited, ServerNotice, ServerReport, WorldStarted
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages.connect import call_rank
from pytest_accel.messages.rank_messages import FAILED_BY_HOOK, RETIRED, Command, ExitCause, RankExit, When, exited
from pytest_accel.messages.struct_messages import encode, frame
from pytest_accel.messages.unix_sockets import sendall
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.pool.pool_client import PoolMessage, WorldWanted
from pytest_accel.pool.starter import LostPlaceError, Starter, Taken

KEPT_RANKS = 16
"""Number of idle ranks to keep; with more than eight CPU slots the pool keeps two for each slot.

Each has a process with torch in it: some 100 MB that it does not share.
"""
_QUIET_TIMEOUT = 5.0
"""Takes the place of `RETIRE_TIMEOUT` for ranks that have failed their test after a timeout, or torn down before."""
_REPORTING_TIMEOUT = 10.0
"""Seconds in which the starters, at the end of the session, must report the ranks that they have killed."""
_END_POLL = 0.002
"""Seconds between two looks whether all worlds have ended."""
_ANSWER_TIMEOUT = 30.0
"""Seconds after the kill of a world in which its end must be reported.

A fork server that does not report it is stopped (SIGSTOP) or hangs.
"""
SESSION_ENDS = "the session ends"
WANTED = "another request waits for its devices"


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
    task: Task[None] = field(init=False)
    """The task that provides the world."""
    starter: Starter[Any] | None = None
    """The starter whose devices or slots the world gets; None before the task has begun."""
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
    """The processes were told to exit or are being killed, or have ended; how they exit is not reported."""


_STARTING, _IN_USE, _IDLE, _RETIRING, _KILLED = WorldState
NEXT = {
    _STARTING: {_IN_USE, _KILLED},
    _IN_USE: {_IN_USE, _IDLE, _RETIRING, _KILLED},
    _IDLE: {_IN_USE, _RETIRING, _KILLED},
    _RETIRING: {_KILLED},
    _KILLED: {_KILLED},
}
"""The states that may follow each state. A world passes from one driver to the next without being idle, and a killed
world may be killed again: the end of the session does that."""


class PooledWorld:
    """One world: its state, the request that it serves, the lease that was taken for it, and the exits of its ranks.

    A lease that a driver's own process uses is a world without ranks. The pool sets all attributes except `state`.
    """

    def __init__(
        self, directory: str, spec: WorldSpec, request: WorldRequest, starter: Starter[Any], taken: Taken
    ) -> None:
        self.spec = spec
        self.inspector = WorldInspector(directory, spec)
        self.starter = starter
        self.state = WorldState.STARTING
        self.request = request
        """The request that gets the world, or was the last to get it."""
        self.taken: Taken | None = taken
        """The lease of the world; None while an idle world has no CPU slots (`Starter.keeps`)."""
        self.pids: tuple[int, ...] = ()
        self.start: Future[None] = get_running_loop().create_future()
        """Done once the processes have started, or cannot be started any more."""
        self.exits: dict[int, RankExit] = {}
        """The exit status of each rank that has ended."""
        self.since = monotonic()
        """Time of the last change of `state`."""

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

    def end_lease(self, *, killed: bool = False) -> None:
        """Give back the lease of the world, if it has any; `killed` says whether the processes were killed."""
        taken, self.taken = self.taken, None
        if taken is not None:
            self.starter.leases.give_back(taken, killed=killed)

    def rank_exited(self, rank: int, end: RankExit) -> None:
        """Record the exit of a rank, and report it to the driver; no-op if an exit of the rank is recorded."""
        if rank not in self.exits:
            self.exits[rank] = end
            if self.state in (WorldState.STARTING, WorldState.IN_USE):
                self.request.driver.handle(RankExited(self.spec.world, rank, end))


class Worlds(dict[int, PooledWorld]):
    """The worlds of a session that have processes, by number. Owned by the pool, and told by the starters.

    The pool adds worlds, and passes them from driver to driver. How they start and end is decided here.
    """

    def __init__(self, directory: str, slots: int, record: Recorder, on_error: Callable[[str], None]) -> None:
        """`on_error` gets the error after which no world can be started any more."""
        super().__init__()
        self.directory = directory
        self.errors: list[str | RankProblem] = []
        """Errors that belong to no test, such as an error in the teardown of a session fixture."""
        self.interrupted: dict[int, Interrupted] = {}
        """The tests that ran when the session was interrupted, by world number."""
        self.closing = False
        """True once the session ends."""
        self._slots = slots
        self._record = record
        self._on_error = on_error

    def find_idle(self, request: WorldRequest) -> PooledWorld | None:
        """Return an idle world for `request`, or None."""
        key = request.demand.key
        found = [one for one in self.in_state(WorldState.IDLE) if one.spec.key == key]
        # Prefer a world that the driver has used last: it has the fixtures of the module.
        return next((one for one in found if one.request.driver is request.driver), found[0] if found else None)

    def note(self, world: PooledWorld, event: str, /, **fields: Any) -> None:
        """Record an event of a world, but not of a lease without ranks."""
        if world.spec.ranks:
            self._record(event, **{"world": world.spec.world, **fields})

    async def start(self, world: PooledWorld) -> None:
        """Start the processes of a world, and wait until they have started; otherwise kill it and raise an error."""
        assert world.taken is not None
        try:
            world.starter.start(world.spec, world.taken)
        except Exception as error:  # For example no memory for a process.
            self._not_started(world.spec.world, str(error) if isinstance(error, NoThreadError) else format_exc())
        try:
            await world.start
            if world.state is not WorldState.STARTING:
                raise LostPlaceError("the ranks have ended while they were started")
        except BaseException as error:
            if world.state is WorldState.STARTING:
                self.kill(world, "its request was cancelled" if isinstance(error, CancelledError) else str(error))
            raise

    def kill(self, world: PooledWorld, why: str) -> None:
        """Kill the processes of a world at once, because of `why`."""
        world.become(WorldState.KILLED)
        loop_tasks.fail(world.start, PlaceError(why))
        self.note(world, "WorldEnding", why=why, killed=True)
        if world.ended:
            self.forget(world)
        else:
            world.starter.kill(world.spec)

    def retire(self, world: PooledWorld, why: str, *, quietly: bool = False) -> None:
        """Have the ranks end their pytest sessions because of `why`; kill ranks that run after `RETIRE_TIMEOUT`.

        With `quietly`, errors in this are not reported, and the ranks are killed after `_QUIET_TIMEOUT`.
        """
        world.become(WorldState.KILLED if quietly else WorldState.RETIRING)
        self.note(world, "WorldEnding", why=why)
        for rank, pid in enumerate(world.pids):
            with suppress(OSError), call_rank(self.directory, world.spec, rank, pid) as call:
                sendall(call, frame(encode(Command.RETIRE)))
        if world.ended:
            self.forget(world)
        else:
            get_running_loop().call_later(_QUIET_TIMEOUT if quietly else RETIRE_TIMEOUT, self._kill_late, world)

    def _kill_late(self, world: PooledWorld) -> None:
        """Kill the ranks of a retired world that have not ended in time."""
        if world.state is WorldState.RETIRING:
            stacks = world.inspector.stacks(world.alive)
            for rank in world.alive:
                self.add_problem(OutsideError.NOT_ENDED, world, rank, stack=stacks.get(rank, ""))
        if world.spec.world in self:
            self.kill(world, "its ranks have not ended in time")

    def forget(self, world: PooledWorld) -> None:
        """Remove a world whose processes have ended, and give back its devices or CPU slots."""
        if self.pop(world.spec.world, None) is None:
            return
        killed = world.state is not WorldState.RETIRING  # Otherwise they were killed by the session, or died in a test.
        world.become(WorldState.KILLED)
        self.note(world, "WorldGone")
        world.inspector.remove_files()
        world.end_lease(killed=killed and world.spec.ranks > 0)

    def retire_idle(self) -> None:
        """Retire the oldest of too many idle ranks.

        A world is kept warm, since the next test of its key then starts within milliseconds. The price is the memory of
        its processes. Its devices are given up once a test of this or another session waits for them.
        """
        idle = sorted(self.in_state(WorldState.IDLE), key=lambda world: world.since)
        # The world that became idle last stays, however many ranks it has: the next test may need the same world.
        while len(idle) > 1 and sum(world.spec.ranks for world in idle) > max(KEPT_RANKS, 2 * self._slots):
            self.retire(idle.pop(0), "more ranks were idle than are kept")

    def kill_silent_servers(self) -> None:
        """Kill the servers that have not reported in time that a world has started, or that its ranks have ended."""
        limits = {WorldState.STARTING: START_TIMEOUT, WorldState.KILLED: _ANSWER_TIMEOUT}
        for world in list(self.values()):
            if monotonic() - world.since > limits.get(world.state, math.inf):
                world.starter.kill_servers(world.spec)

    async def end(self, *, gracefully: bool) -> None:
        """End all worlds, the idle ones with the teardown of their session fixtures if `gracefully`, and wait for it.

        Worlds stay if their starter does not report in time that all ranks have ended.
        """
        for world in list(self.values()):
            if gracefully and world.state is WorldState.IDLE:
                self.retire(world, SESSION_ENDS)
            elif not world.ending or not gracefully:
                self.kill(world, SESSION_ENDS)
        await loop_tasks.becomes_true(lambda: not self, RETIRE_TIMEOUT + _REPORTING_TIMEOUT, _END_POLL)
        for world in self.in_state(WorldState.RETIRING):
            self.add_problem(OutsideError.NOT_TORN_DOWN, world, 0)
            self.kill(world, SESSION_ENDS)

    def in_state(self, state: WorldState) -> Iterator[PooledWorld]:
        """Yield the worlds that are in `state` when their turn comes: the caller may change states meanwhile."""
        for world in list(self.values()):
            if world.state is state:
                yield world

    # Errors that belong to no test, and interrupted tests

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
        stacks, records = world.inspector.stacks(world.alive), world.inspector.records(world.alive)
        idle = all(stack and where(frames_of_rank(stack)) is None for stack in stacks.values())
        between_tests = not test and not ends and idle
        if between_tests and not any(map(waiting_in, records.values())):
            return
        self.interrupted[world.spec.world] = Interrupted(test, ends, stacks, records)

    def add_problem(
        self, error: OutsideError, world: PooledWorld, rank: int, end: RankExit | None = None, *, stack: str = ""
    ) -> None:
        """Add an error of a rank, with its log; `end` is the rank's exit if that is the error."""
        phases: dict[int, When] = {rank: "teardown"}
        sections = world.inspector.ask(MachineInspector.captured, phases).get(rank, [])
        if end is not None and end.is_crash:
            stack = world.inspector.ask(MachineInspector.last_stacks, {rank: True}).get(rank, "")
        output = "\n".join(text.strip("\n") for _, text in sections)[-LAST_OUTPUT:]
        self.errors.append(RankProblem(error, rank, world.spec.ranks, end, RETIRE_TIMEOUT, stack, output))

    # Called by starters

    def give_up_wanted(self) -> None:
        """Retire the idle worlds whose leases are wanted, and notify the drivers that use others."""
        for world in [one for one in self.values() if one.wanted]:
            if world.state is WorldState.IDLE:
                self.retire(world, WANTED)
            elif world.state is WorldState.IN_USE:
                world.request.driver.handle(WorldWanted(world.spec.world))

    def report(self, message: ServerReport) -> None:
        """Handle a report of a fork server."""
        match message:
            case WorldStarted(number, problem=why) if why:
                self._not_started(number, why)
            case WorldStarted(number, pids):
                self._started(number, pids)
            case RankExited(number, rank, end):
                self.exited(number, rank, end)
            case ServerNotice(error, survivors):
                self.report_left(survivors)
                if error:
                    self._on_error(error)

    def _started(self, number: int, pids: tuple[int, ...]) -> None:
        """Wake the request of a world whose processes have started."""
        world = self.get(number)
        if world is not None and world.state is WorldState.STARTING:
            world.pids = pids
            self._record("WorldReady", world=number, pids=pids)
            if not world.start.done():
                world.start.set_result(None)

    def _not_started(self, number: int, why: str) -> None:
        """Forget a world that could not be started, and fail its request."""
        if (world := self.get(number)) is not None:
            self.forget(world)
            separator = "\n" if "\n" in why else " "
            loop_tasks.fail(world.start, PlaceError(f"the ranks could not be started:{separator}{why}"))

    def exited(self, number: int, rank: int, end: RankExit) -> None:
        """Record the exit of a rank; add an error to the session's summary if no driver can notice the exit."""
        world = self.get(number)
        if world is None:
            return
        world.rank_exited(rank, end)
        if world.state is WorldState.RETIRING and end == exited(FAILED_BY_HOOK):
            self.add_problem(OutsideError.FAILED_BY_HOOK, world, rank)
        elif world.state is WorldState.RETIRING and end.status != RETIRED:
            self.add_problem(OutsideError.DIED_IN_TEARDOWN, world, rank, end)
        elif world.state is WorldState.IDLE:
            self.add_problem(OutsideError.DIED_BETWEEN_TESTS, world, rank, end)
            self.kill(world, "a rank has ended")
        if world.ended and world.ending:
            self.forget(world)

    def report_left(self, processes: Iterable[str]) -> None:
        """Report processes that live on although they were killed."""
        self.errors += [f"{process} could not be killed" for process in processes]

    def lost_ranks(self, starter: Starter[Any], server: int, loss: str | None) -> None:
        """End the worlds whose ranks have ended with the fork server that had started them."""
        log = tail(server_log_path(self.directory, server))
        why, end = f"the fork server ended twice while starting a world\n{log}", RankExit(ExitCause.SERVER_ENDED)
        if loss is not None:
            why, end = f"a machine of this session is lost: {loss}", RankExit(ExitCause.MACHINE_LOST, about=loss)
        worlds = [one for one in self.values() if one.starter is starter and server in one.spec.servers]
        for world in worlds:
            for rank, number in enumerate(world.spec.servers):
                if number == server:
                    world.rank_exited(rank, end)  # Before the slow cleanup, since the drivers wait for it.
        self.report_left(kill_marked(self.directory, server))
        for world in worlds:
            if world.state is WorldState.RETIRING and self.closing:
                self.add_problem(OutsideError.NOT_TORN_DOWN, world, 0)
            loop_tasks.fail(world.start, LostPlaceError(why))
            if world.state is not WorldState.IN_USE:  # Drivers give back worlds in use.
                self.kill(world, why)
