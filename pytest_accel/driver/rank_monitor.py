"""Receives the messages of the ranks of a world, and notices how the ranks end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector

from pytest_accel.core.clock import monotonic, wall_clock
from pytest_accel.diagnostics.collectives import deadlocked
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.diagnostics.rank_state import PHASES, Hang, HangCause, RankOutcome
from pytest_accel.diagnostics.waiting_limits import beginning
from pytest_accel.driver.debugger_relay import DebuggerRelay
from pytest_accel.driver.link_to_rank import LinkToRank
from pytest_accel.messages.flight_record import FlightRecord, RankWait
from pytest_accel.messages.rank_messages import (
    Announced,
    CannotRun,
    Collected,
    ExitRequest,
    Finished,
    ForkReturned,
    PhaseReport,
    RankMessage,
    TerminalRequest,
    TornDown,
    When,
)
from pytest_accel.messages.unix_sockets import has_ended, is_readable
from pytest_accel.pool.pool_client import PoolClient, WorldGrant
from pytest_accel.verdict import sentences

_REACTION = 0.5
"""Seconds in which a rank that hangs in Python code has failed its test after `INTERRUPT_SIGNAL`."""
_EXIT_STATUS_TIMEOUT = 30.0
"""Seconds to wait for the exit status of a rank whose process has ended."""
_QUIET = 1.0
"""Seconds without a message of a rank before the first look for a deadlock, and between two looks that must agree."""
_NEXT_LOOK = 2.0
"""Seconds between two looks that have found nothing. A deadlock is found within 4 seconds."""
_CLOSED_TIMEOUT = 5.0
"""Seconds to wait for the exit status of a rank whose connection has been closed; its process may go on."""


class RankMonitor:
    """Receives the messages of a world's ranks, and records how the ranks end. Owned by the driver's `World`."""

    def __init__(self, grant: WorldGrant, pool_client: PoolClient, debugger: DebuggerRelay) -> None:
        """Connect to the ranks of `grant`. Requests of the ranks for a debugger go to `debugger`."""
        self._number = grant.spec.world
        self._pool_client = pool_client
        self.kill_reason: str | None = None
        """The reason to kill the ranks, or None if they need not be killed. The first reason is kept."""
        self.retire = False
        """True if the ranks must not run another test, but can shut down cleanly."""
        self._debugger = debugger
        self._has_records = grant.spec.ranks > 1 and grant.spec.key.grouped and grant.spec.key.init
        """True if the ranks answer at once when they are asked for records of their collectives.

        In a world without a process group of its own, a rank that has not made a group does not answer.
        """
        self._inspector = WorldInspector(grant.directory, grant.spec)
        self.serial = 0
        """Number of the current test."""
        self.began = 0.0
        """Time at which the current test began (`clock.monotonic`)."""
        self.ready: set[int] = set()
        """The ranks that can run tests."""
        self.exit_request: ExitRequest | None = None
        self.records: dict[int, FlightRecord] = {}
        """The records of the living ranks of a test that failed."""
        self._deadlock: dict[int, RankWait] = {}
        """The waits that the last look has found to have no end; empty if ranks have sent messages since."""
        self._next_look = 0.0
        """Time at which to look for a deadlock next (`clock.monotonic`)."""
        self._extras: list[tuple[int, PhaseReport]] = []
        self._selector = DefaultSelector()
        self.ranks: list[LinkToRank] = []
        try:
            for number in range(grant.spec.ranks):
                rank = LinkToRank(grant, number)
                self.ranks.append(rank)
                for source in rank.sources:
                    self._selector.register(source, EVENT_READ, rank)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections to the ranks."""
        for rank in self.ranks:
            rank.close()
        self._selector.close()

    @property
    def reusable(self) -> bool:
        """True if nothing is known that keeps the world from running another test."""
        return self.kill_reason is None and not self.retire

    def rule_out(self, kill_reason: str | None = None, *, retire: bool = False) -> None:
        """Have the world killed for `kill_reason`, or shut down cleanly if `retire` is set; no-op without either."""
        self.kill_reason = self.kill_reason or kill_reason
        self.retire = self.retire or retire

    def begin(self, now: float) -> None:
        """Make a test the current test, which begins at the time `now`. Called for its collection, too."""
        self.serial += 1
        self.began = now
        self._debugger.begin()
        self._extras.clear()
        self.records = {}
        for rank in self.ranks:
            rank.begin()

    @property
    def has_extras(self) -> bool:
        """True if `take_extras` has not returned all additional reports of the test."""
        return bool(self._extras)

    def take_extras(self, when: When) -> list[tuple[int, PhaseReport]]:
        """Return the additional reports of phase `when` and earlier phases, with their ranks, and forget them."""
        phases = PHASES[: PHASES.index(when) + 1]
        taken = [entry for entry in self._extras if entry[1].when in phases]
        self._extras = [entry for entry in self._extras if entry[1].when not in phases]
        return taken

    def pump(self, deadline: float) -> bool:
        """Handle messages and exits, waiting for them until `deadline`; return False if there were none."""
        now = monotonic()
        events = self._selector.select(max(deadline - now, 0.0) if deadline < math.inf else None)
        if events:
            # Look for a deadlock only after a time without messages.
            self._deadlock, self._next_look = {}, monotonic() + _QUIET
        for key, _ in events:
            rank: LinkToRank = key.data
            if rank.end is not None:
                continue
            try:
                if key.fileobj is rank.connection:
                    self._receive(rank)
                else:
                    self._handle_exit(rank)
            except (EOFError, OSError):
                self._handle_exit(rank)
        return bool(events)

    def _receive(self, rank: LinkToRank) -> None:
        """Handle the messages of `rank` that have arrived; raise EOFError or OSError if its connection has ended."""
        try:
            for message in rank.receive():
                self._handle(rank, message)
        except ValueError as error:
            text = f"sent a message that cannot be read: {error}"
            self._record_end(rank, RankOutcome(rank.rank, "died", monotonic(), text=text))

    def _drain(self, rank: LinkToRank) -> None:
        """Handle all messages that a rank has sent until now."""
        with suppress(EOFError, OSError):
            while rank.end is None and is_readable(rank.connection.fileno()):
                self._receive(rank)

    def _handle(self, rank: LinkToRank, message: RankMessage) -> None:
        if isinstance(message, PhaseReport) and message.serial == self.serial:
            if message.at:
                rank.reports[message.when] = message
            else:  # An additional report, for example of a subtest.
                self._extras.append((rank.rank, message))
        elif isinstance(message, Finished) and message.serial == self.serial:
            rank.finished = message
            self.rule_out(sentences.kill_reason(message), retire=bool(message.doubt) and not message.device_error)
        elif message is None:
            self.ready.add(rank.rank)
        elif isinstance(message, Collected):
            rank.collected = message
        elif isinstance(message, CannotRun):
            end = RankOutcome(rank.rank, "unstarted", monotonic(), text=message.text, headline=message.headline)
            self._record_end(rank, end)
        elif isinstance(message, ForkReturned):
            rank.forget_reports(message.phase)
            self._record_end(rank, RankOutcome(rank.rank, "failed", monotonic(), text=message.text))
        elif isinstance(message, ExitRequest):
            self.exit_request = self.exit_request or message
            text = sentences.exit_request(message.reason)
            self._record_end(rank, RankOutcome(rank.rank, "died", monotonic(), text=text))
        elif isinstance(message, Announced):
            if message.serial == self.serial and rank.phase == "call":
                rank.announced = message
        elif isinstance(message, TerminalRequest):
            if message.method is None:
                self._debugger.release()
            else:
                self._debugger.ask(rank.rank, message.method)
        elif isinstance(message, TornDown):
            rank.torn_down = message

    # Observation from outside

    @property
    def _alive(self) -> dict[int, int]:
        """The process ids of the ranks that have not ended, by rank."""
        return _pids(rank for rank in self.ranks if rank.end is None)

    def stacks(self) -> dict[int, str]:
        """Return the present stacks of every living rank."""
        return self._inspector.stacks(self._alive)

    def finds_deadlock(self, deadline: float) -> bool:
        """Return True if two looks have found the same deadlock; `deadline` is the end of the test's own timeout."""
        now = monotonic()
        if not self._has_records or now < self._next_look:
            return False
        before, self._deadlock = self._deadlock, {}
        if not self.is_any_computing():
            records = self._inspector.records(self._alive)
            if len(records) == len(self.ranks):
                unfinished = [rank.rank for rank in self.ranks if not rank.done]
                self._deadlock = deadlocked(records, unfinished, deadline - now)
        # Two looks that must agree follow each other soon.
        self._next_look = monotonic() + (_QUIET if self._deadlock else _NEXT_LOOK)
        return bool(self._deadlock) and self._deadlock == before

    def is_any_computing(self) -> bool:
        """Return True if a rank that has not finished the test is computing."""
        unfinished = _pids(rank for rank in self.ranks if not rank.done)
        return any(self._inspector.ask(MachineInspector.computing, unfinished).values())

    def is_any_held_up(self) -> bool:
        """Return True if a rank that has not finished the test waits for a processor or a disk."""
        unfinished = _pids(rank for rank in self.ranks if not rank.done)
        return any(self._inspector.ask(MachineInspector.held_up, unfinished).values())

    # Exits and hangs of ranks

    def record_hung(self, pending: Sequence[LinkToRank], hang: Hang) -> None:
        """Take the stacks of the ranks `pending`, and record that they hang, and why."""
        phases = {rank.rank: rank.phase for rank in pending}
        is_early = hang.cause in (HangCause.OTHER_RANK, HangCause.DEADLOCK)
        stacks, self.records = self._inspector.stacks(_pids(pending)), self._inspector.records(self._alive)
        for rank in pending:
            phase = phases[rank.rank]
            # Before the timeout, a rank that goes on while the stacks are taken does not hang. Afterwards it hangs.
            if is_early:
                self._drain(rank)
                if rank.done or rank.phase != phase:
                    continue
            end = RankOutcome(rank.rank, "hung", monotonic(), stack=stacks.get(rank.rank, ""), hang=hang)
            self._record_end(rank, end)
        if hang.cause in (HangCause.PHASE_TIMEOUT, HangCause.OTHER_RANK):
            self._interrupt([rank for rank in pending if rank.end is not None])

    def _interrupt(self, hung: Sequence[LinkToRank]) -> None:
        """Have ranks that hang in Python code fail, so that their fixtures are torn down before they are killed.

        Ranks in C code do not react.
        """
        self._inspector.ask(MachineInspector.interrupt, _pids(hung))
        deadline = monotonic() + _REACTION
        for rank in hung:
            descriptor = rank.connection.fileno()
            reacts = is_readable(descriptor, max(0.0, deadline - monotonic()))
            rank.interrupted = reacts and not has_ended(descriptor)
        self.rule_out(retire=any(rank.interrupted for rank in hung))

    def _record_end(self, rank: LinkToRank, end: RankOutcome) -> None:
        """Record the `end` of `rank`, in the first phase that it has not reported; receive no more messages of it.

        Add to `end` what is known from outside: the phase with its times, the output, and the stack of a dead rank.
        """
        captured = self._inspector.ask(MachineInspector.captured, {rank.rank: rank.phase}).get(rank.rank, [])
        if end.ending == "died":
            crashed = {rank.rank: end.exit is not None and end.exit.is_crash}
            end = end._replace(stack=self._inspector.ask(MachineInspector.last_stacks, crashed).get(rank.rank, ""))
        epoch = wall_clock() - monotonic()
        span = epoch + beginning(rank.phase, [rank], self.began), epoch + end.at
        rank.end = end._replace(sections=(*rank.sections, *captured), span=span, when=rank.phase)
        for source in rank.sources:
            if source in self._selector.get_map():
                self._selector.unregister(source)
        self.rule_out(sentences.describe_end(rank.end))

    def _handle_exit(self, rank: LinkToRank) -> None:
        """Handle the exit of a rank's process, or the end of its connection."""
        now = monotonic()
        self._drain(rank)
        if rank.end is not None:
            return  # The rank had sent the reason.
        timeout = _EXIT_STATUS_TIMEOUT if rank.has_exited else _CLOSED_TIMEOUT
        end = self._pool_client.rank_exit(self._number, rank.rank, timeout)
        self._record_end(rank, RankOutcome(rank.rank, "died", now, exit=end))


def _pids(ranks: Iterable[LinkToRank]) -> dict[int, int]:
    """Return the process ids of `ranks`, by rank."""
    return {rank.rank: rank.pid for rank in ranks}
