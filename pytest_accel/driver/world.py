"""A world as its driver uses it: sends a test to the ranks and gathers what becomes of it, phase by phase."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

from pytest_accel.core import prctl
from pytest_accel.core.clock import monotonic
from pytest_accel.core.connect import call_rank
from pytest_accel.core.messages import (
    Astray,
    Broken,
    ExitRequest,
    ExtraReport,
    Finished,
    GivesTerminal,
    Location,
    NodeRef,
    PhaseReport,
    Ready,
    RunTest,
    WantsTerminal,
    When,
)
from pytest_accel.core.timeouts import GRACE, START_PATIENCE
from pytest_accel.diagnostics.diagnosis import NOTHING, Examiner
from pytest_accel.diagnostics.inspector import NodeInspector, WorldInspector
from pytest_accel.diagnostics.oom import describe_death
from pytest_accel.diagnostics.rank_state import PHASES, Ending, RankOutcome, RankState
from pytest_accel.diagnostics.waiting_limits import Grace, beginning, grace
from pytest_accel.driver.debugger_relay import Call, Lending
from pytest_accel.driver.log_tail import Streams
from pytest_accel.pool.pool_client import Port
from pytest_accel.pool.records import Grant
from pytest_accel.rank.run_ahead import go_on

_STALLED = 30
"""Seconds after which a rank that has sent half a message counts as gone."""
_EXIT_PATIENCE = 1.0
_LOOK_AGAIN = 0.2
"""Seconds after which a rank that has not spoken is looked at: it says that it has passed when the test has ended."""

QUIET = 30.0
"""Seconds in one phase of a test after which a person at the terminal is told what the ranks are doing."""

OnQuiet = Callable[[When, float, float, dict[int, str], list[str]], None]
"""Gets the phase, its seconds until now, its timeout, where ranks are, and lines about their collectives."""

_STREAM_AGAIN = 0.05
"""Seconds between two looks at what the ranks write, where it is shown."""


class LostWorld(Exception):
    """A warm world had died before its driver got it."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Rank(RankState):
    pid: int
    connection: Connection
    pidfd: int | None


class World:
    """The ranks of a grant. Not for several threads."""

    def __init__(
        self,
        grant: Grant,
        port: Port,
        lending: Lending,
        streams: Streams | None = None,
        on_quiet: OnQuiet | None = None,
    ) -> None:
        """Connects to the ranks; :meth:`start` waits until they are ready. `streams` shows what they write.

        `on_quiet` is called once in a phase that lasts for `QUIET` seconds.
        """
        self._on_quiet = on_quiet
        self._quiet: tuple[int, When] | None = None
        """Test and phase for which `on_quiet` has been called."""
        self._lending = lending
        self._streams = streams
        self.grant = grant
        self.findings = NOTHING
        """What is known of the living ranks of a test that has gone wrong."""
        self.harm: str | None = None
        """Why it must not run another test; None while it may."""
        self.worn = False
        """Whether it should not run another test, but may end in good order."""
        self.exit_request: ExitRequest | None = None
        self.extras: list[tuple[int, ExtraReport]] = []
        self._port = port
        self._serial = 0
        self._told_ahead = False
        self._began = 0.0
        self._ready: set[int] = set()
        self._told: set[int] = set()
        """Ranks whose end has been given out as an outcome. Any other death is for the pool to complain of."""
        self._inspector = WorldInspector(grant.directory, grant.spec)
        self._oom_kills = self._count_oom_kills()
        self._examiner = Examiner(self._inspector, grouped=grant.spec.grouped)
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        for rank, pid in enumerate(grant.pids):
            self._ranks.append(self._connect(rank, pid))

    @property
    def number(self) -> int:
        return self.grant.spec.world

    @property
    def size(self) -> int:
        return self.grant.spec.ranks

    def _connect(self, rank: int, pid: int) -> _Rank:
        try:
            call = call_rank(self.grant.directory, self.grant.spec, rank, pid)
        except OSError:
            # It is dead: the connection ends at once, and the death is found where all deaths are found.
            call, other = socket.socketpair()
            other.close()
        call.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALLED, 0))
        connection = Connection(call.detach())
        # On another machine the bridge looks at the process, and ends the connection with it.
        pidfd = None if self.grant.spec.is_far(rank) else prctl.end_of(pid)
        found = _Rank(rank=rank, pid=pid, connection=connection, pidfd=pidfd)
        self._selector.register(connection, selectors.EVENT_READ, found)
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, found)
        return found

    def start(self) -> tuple[RankOutcome, ...] | None:
        """Wait until every rank can take a test; None: they all can, else what has become of each.

        :class:`LostWorld`: a rank of a warm world had died before it was granted, which concerns no test to come.
        """
        deadline = monotonic() + START_PATIENCE
        while len(self._ready) + sum(rank.end is not None for rank in self._ranks) < self.size:
            if any(rank.end is not None for rank in self._ranks):
                deadline = min(deadline, monotonic() + GRACE)
            if not self._pump(deadline):
                silent = [rank for rank in self._ranks if rank.rank not in self._ready and not rank.done]
                spent = self._grace()._replace(seconds=GRACE)
                self._give_up(silent, f"did not become ready within {START_PATIENCE:g} s (timeout)", spent)
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        if self.grant.warm and any(end.ending == "died" for end in ends):
            raise LostWorld
        self._told |= {end.rank for end in ends}
        return tuple(rank.end or RankOutcome(rank.rank, "passed") for rank in self._ranks) if ends else None

    @property
    def used(self) -> bool:
        """Whether this driver has sent it a test."""
        return self._serial > 0

    def send(
        self, node: NodeRef, location: Location, following: NodeRef | None, *, last: bool, ahead: bool = False
    ) -> None:
        """Have every rank run the test `node`, in place of one that they were told of ahead.

        `ahead`: have them run it when they all have passed the test that they run now.
        """
        if ahead:
            self._told_ahead = True
        else:
            self._begin(monotonic())
        data = pickle.dumps(RunTest(self._serial + ahead, node, location, following, last, ahead))
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # It is dead, and found so in the first phase.
                rank.connection.send_bytes(data)

    @property
    def goes_on(self) -> bool:
        """Whether the ranks have gone on to the test that they were told of ahead: known when the last has ended."""
        words = [rank.finished.word for rank in self._ranks if rank.finished is not None and rank.end is None]
        return self._told_ahead and go_on(words, self.size)

    def follow(self) -> None:
        """Turn to the test that the ranks have gone on to."""
        self._begin(max(rank.reports["teardown"].at for rank in self._ranks))
        self._end_early()

    def _end_early(self) -> None:
        for rank in self._ranks:
            if rank.died_early is not None:
                self._end_dead(rank, rank.died_early)

    def _begin(self, now: float) -> None:
        self._serial += 1
        self._told_ahead = False
        self._began = now
        self._lending.begin()
        self.extras.clear()
        self.findings = NOTHING
        for rank in self._ranks:
            for message in rank.begin():
                self._take(rank, message)

    def wait(self, when: When, timeout: float, left: float | None = None) -> tuple[RankOutcome, ...]:
        """Return how phase `when` ended on every rank, at most `timeout` seconds after it began, and a short grace.

        `left`: what is left of the `timeout`, if it is not the phase's alone. Once a rank has failed or ended, those
        that may wait for it get the grace to come to the end of the test; a rank that does not is terminated, and the
        world with it. All ranks are waited for then, so that whatever becomes of them is reported with the failure.
        """
        left = timeout if left is None else left
        while pending := [rank for rank in self._ranks if not rank.settled(when)]:
            self._pump_or_give_up(pending, when, timeout, left)
        while (pending := [rank for rank in self._ranks if not rank.done]) and self._has_gone_wrong:
            # Ranks that are not in their teardown have the grace alone.
            in_teardown = all(rank.settled("call") for rank in pending)
            if not in_teardown and self._grace().end == math.inf:
                break  # The failure is in a teardown alone: the other ranks' phases have their own timeouts.
            self._pump_or_give_up(pending, "teardown", timeout, left if in_teardown else math.inf)
        if when == "teardown" and not self.goes_on:
            self._end_early()
        if self._streams is not None:
            self._streams.finish() if when == "teardown" else self._streams.drain()
        outcomes = tuple(rank.outcome(when) for rank in self._ranks)
        self._told |= {rank.rank for rank, outcome in zip(self._ranks, outcomes, strict=True) if outcome is rank.end}
        return outcomes

    @property
    def _has_gone_wrong(self) -> bool:
        return any(rank.end is not None or rank.died_early is not None or rank.has_failed for rank in self._ranks)

    def _pump_or_give_up(self, pending: list[_Rank], when: When, timeout: float, left: float) -> None:
        """Wait for news of `pending`; past the end of phase `when`, or the grace after a failure, terminate them."""
        if self._lending.serve(self._place, self._wait_for_debugger):
            return
        began = max(beginning(when, self._ranks, self._began), self._lending.ended)
        deadline = began + left
        limit = min(deadline, self._grace().end)
        shown = self._streams is not None and self._streams.show()
        look_again = 0.0 if shown else _LOOK_AGAIN if self._streams is None else _STREAM_AGAIN
        if self._pump(min(limit, monotonic() + look_again)):
            return
        noted = self._noted(self._ranks)
        # What a rank has sent before it noted a phase counts first. Those who are waited for may be others then.
        if self._pump(0.0) or self._catch_up(noted):
            return
        if self._on_quiet is not None and monotonic() > began + QUIET and self._quiet != (self._serial, when):
            self._quiet = self._serial, when
            places, collectives = self._examiner.progress(_pids(rank for rank in self._ranks if rank.end is None))
            self._on_quiet(when, monotonic() - began, timeout, places, collectives)
        spent = self._grace()
        if monotonic() >= min(deadline, spent.end):
            timed_out = f"did not finish the {when} phase within {timeout:g} s (timeout)"
            self._give_up(pending, timed_out, spent if spent.end < deadline else Grace())

    def _place(self, rank: int) -> tuple[int | None, Call]:
        pid = self._ranks[rank].pid
        spec = self.grant.spec
        return None if spec.is_far(rank) else pid, partial(call_rank, self.grant.directory, spec, rank, pid)

    def _wait_for_debugger(self) -> bool:
        self._pump(math.inf)
        holder = self._lending.holder
        return holder is not None and self._ranks[holder].end is None and self._ranks[holder].died_early is None

    def finished(self) -> dict[int, Finished]:
        """What each rank left behind, of those that came to the end of the test."""
        return {rank.rank: rank.finished for rank in self._ranks if rank.finished is not None}

    def stacks(self) -> dict[int, str]:
        """Every living rank's stacks now."""
        return self._examiner.stacks(_pids(rank for rank in self._ranks if rank.end is None))

    def close(self) -> None:
        """Give the world back to the pool."""
        if self._streams is not None:
            self._streams.finish()
        for rank in self._ranks:
            rank.connection.close()
            if rank.pidfd is not None:
                os.close(rank.pidfd)
        self._selector.close()
        # Whatever a test has left behind, ranks that have come to its end can end in good order.
        ended = all(rank.finished is not None and rank.end is None for rank in self._ranks) and not self.goes_on
        worn = self.worn or (self.harm is not None and ended)
        self._port.release(self.number, self.harm, frozenset(self._told), worn)

    @property
    def alive(self) -> bool:
        """Whether every rank is still there, looked at now."""
        while self._pump(0.0):
            pass
        return all(rank.end is None for rank in self._ranks)

    # Events

    def _noted(self, ranks: Sequence[_Rank]) -> dict[int, tuple[int, float]]:
        """Return how many phases each of `ranks` has noted as passed, and when it did so."""
        asked = self._inspector.ask(NodeInspector.progress, {one.rank: None for one in ranks})
        # Notes of another test, perhaps of another driver's, do not count: each driver counts tests from one.
        return {
            number: (passed, at)
            for number, (serial, passed, at) in asked.items()
            if serial == self._serial and at >= self._began
        }

    def _catch_up(self, noted: Mapping[int, tuple[int, float]]) -> bool:
        """Take the phases that ranks have `noted`, and not reported yet, as passed; return whether there were any."""
        news = False
        for number, (passed, at) in noted.items():
            news |= self._ranks[number].has_passed(self._serial, passed, at)
        return news

    def _grace(self) -> Grace:
        return grace(self._ranks, self._lending.ended, self._is_any_at_work)

    def _is_any_at_work(self) -> bool:
        return any(
            self._inspector.ask(NodeInspector.at_work, _pids(rank for rank in self._ranks if not rank.done)).values()
        )

    def _pump(self, deadline: float) -> bool:
        """Take in what has come, waiting for it until `deadline`; False: nothing came."""
        patience = max(0.0, deadline - monotonic()) if deadline < math.inf else None
        events = self._selector.select(patience)
        for key, _ in events:
            rank: _Rank = key.data
            if rank.end is not None or rank.died_early is not None:
                continue
            if key.fileobj is rank.connection:
                self._receive(rank)
            else:
                self._died(rank)
        return bool(events)

    def _receive(self, rank: _Rank) -> None:
        try:
            self._take_all(rank)
        except (EOFError, OSError):
            self._died(rank)

    def _take_all(self, rank: _Rank) -> None:
        try:
            messages = rank.connection.recv()
        except BlockingIOError:
            stack = self.stacks().get(rank.rank, "")
            self._close(rank, "hung", f"stopped in the middle of a message for {_STALLED} s", stack)
            return
        for message in messages:
            self._take(rank, message)

    def _drain(self, rank: _Rank) -> None:
        """What a rank has sent until now."""
        with contextlib.suppress(EOFError, OSError):
            while rank.end is None and rank.connection.poll():
                self._take_all(rank)

    def _take(self, rank: _Rank, message: object) -> None:
        if rank.finished is not None and self._told_ahead:
            rank.early.append(message)
        elif isinstance(message, Ready):
            self._ready.add(rank.rank)
        elif isinstance(message, Broken):
            self._close(rank, "unstarted", message.text)
        elif isinstance(message, Astray):
            self._close(rank, "failed", message.text, phase=message.phase)
        elif isinstance(message, ExitRequest):
            self.exit_request = self.exit_request or message
            self._close(rank, "died", f"asked for the end of the session: {message.reason}")
        elif isinstance(message, PhaseReport) and message.serial == self._serial:
            rank.reports[message.when] = message
        elif isinstance(message, ExtraReport) and message.serial == self._serial:
            self.extras.append((rank.rank, message))
        elif isinstance(message, WantsTerminal):
            self._lending.ask(rank.rank, message.method)
        elif isinstance(message, GivesTerminal):
            self._lending.holder = None
        elif isinstance(message, Finished) and message.serial == self._serial:
            rank.finished = message
            self.harm = self.harm or message.harm
            self.worn = self.worn or message.worn

    # Endings

    def _close(
        self,
        rank: _Rank,
        ending: Ending,
        text: str,
        stack: str = "",
        at: float | None = None,
        *,
        phase: When | None = None,
        secondary: bool = False,
    ) -> None:
        """Take no more from `rank`, which has ended in `phase`; None: in the first that it has not noted as passed."""
        before = len(PHASES) if phase is None else PHASES.index(phase)
        self._catch_up({number: (min(passed, before), at) for number, (passed, at) in self._noted([rank]).items()})
        log = self._inspector.ask(NodeInspector.logs, {rank.rank: None}).get(rank.rank, "") if ending != "hung" else ""
        captured = self._inspector.ask(NodeInspector.captured, {rank.rank: rank.phase}).get(rank.rank, [])
        at = monotonic() if at is None else at
        rank.end = RankOutcome(rank.rank, ending, at, None, text, stack, log, tuple(captured), secondary)
        self._deafen(rank)
        self.harm = self.harm or f"rank {rank.rank} {text}"

    def _deafen(self, rank: _Rank) -> None:
        for source in (rank.connection, rank.pidfd):
            if source is not None and source in self._selector.get_map():
                self._selector.unregister(source)

    def _died(self, rank: _Rank) -> None:
        if rank.end is not None:
            return
        now = monotonic()
        self._drain(rank)
        if self._told_ahead and rank.finished is not None and rank.finished.word is not None:
            # In this test still, or in the next one already? That is known when all have finished this one.
            rank.died_early = now
            self._deafen(rank)
        else:
            self._end_dead(rank, now)

    def _end_dead(self, rank: _Rank, at: float) -> None:
        if rank.end is not None:
            return  # It had said why.
        others = [other for other in self._ranks if other is not rank and not other.done and other.died_early is None]
        if others and self._serial and all(other.end is None for other in self._ranks):
            self.findings = self._examiner.at_death(_pids(others))
        status = self._port.exit_status(self.number, rank.rank, _EXIT_PATIENCE)
        text = "lost its connection to the driver (exit status unknown)"
        if status is not None:
            before, self._oom_kills = self._oom_kills, self._count_oom_kills()
            text = describe_death(status, before.get(rank.rank), self._oom_kills.get(rank.rank))
        self._close(rank, "died", text, at=at)

    def _count_oom_kills(self) -> dict[int, int | None]:
        return self._inspector.ask(NodeInspector.oom_kills, dict.fromkeys(range(self.size)))

    def _give_up(self, pending: list[_Rank], timed_out: str, spent: Grace) -> None:
        """Take the stacks of ranks that do not come to an end, and count them as hung.

        `timed_out` says what they did not do in time; `spent` is the grace that is over instead, if one is.
        """
        alive = _pids(rank for rank in self._ranks if rank.end is None)
        # Where a rank has died or failed, it is known what the others wait for.
        fine = [rank for rank in self._ranks if rank.end is None and not rank.has_failed]
        thoroughly = len(fine) == self.size
        stacks, self.findings = self._examiner.hung(alive, _pids(pending), thoroughly=thoroughly)
        for rank in pending:
            stack = stacks.get(rank.rank, "")
            text = f"was terminated {spent.seconds:g} s after {spent.cause}" if spent.cause else timed_out
            self._close(rank, "hung", text, stack, secondary=bool(spent.cause))


def _pids(ranks: Iterable[_Rank]) -> dict[int, int]:
    return {rank.rank: rank.pid for rank in ranks}
