"""The driver's connection to a world: sends tests to the ranks, and collects their outcomes phase by phase."""

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
from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.rank_messages import (
    CannotRun,
    ExitRequest,
    ExtraReport,
    Finished,
    ForkReturned,
    Location,
    NodeRef,
    PhaseReport,
    Ready,
    RunTest,
    TerminalRequest,
    TerminalReturned,
    When,
)
from pytest_accel.core.timeouts import GRACE, START_TIMEOUT
from pytest_accel.diagnostics.diagnosis import NOTHING, Examiner
from pytest_accel.diagnostics.exit_status import describe_exit
from pytest_accel.diagnostics.inspector import NodeInspector, WorldInspector
from pytest_accel.diagnostics.oom import with_memory
from pytest_accel.diagnostics.rank_state import PHASES, Ending, RankOutcome, RankState
from pytest_accel.diagnostics.waiting_limits import Grace, beginning, grace
from pytest_accel.driver.debugger_relay import Connect, DebuggerRelay
from pytest_accel.driver.log_tail import LogTail
from pytest_accel.pool.pool_client import Port
from pytest_accel.pool.records import Grant
from pytest_accel.rank.run_ahead import may_run_ahead

_STALLED = 30
"""Seconds after which a rank that has sent part of a message counts as hung."""
_EXIT_STATUS_TIMEOUT = 1.0
"""Seconds to wait for the exit status of a rank that died."""
_PROGRESS_INTERVAL = 0.2
"""Seconds between two looks at the ranks' progress files: a rank sends the report of a passed phase only at the end."""

QUIET = 30.0
"""Seconds in one phase of a test after which the user at the terminal is shown what the ranks are doing."""

OnQuiet = Callable[[When, float, float, dict[int, str], list[str]], None]
"""Called with the phase, its duration, its timeout, the ranks' places in the code, and lines on collectives."""

_LOG_INTERVAL = 0.05
"""Seconds between two reads of the ranks' logs, if output is shown while the test runs."""


class LostWorld(Exception):
    """A rank of a warm world had died before the world was granted."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Rank(RankState):
    """State of a rank and the driver's connection to it."""

    pid: int
    connection: Connection
    pidfd: int | None
    """Readable when the process has ended (`prctl.end_of`). None if it is on another machine."""


class World:
    """The ranks of a grant, as the driver uses them. Owned by the `Driver`; not thread-safe."""

    def __init__(
        self,
        grant: Grant,
        port: Port,
        debugger: DebuggerRelay,
        log_tail: LogTail | None = None,
        on_quiet: OnQuiet | None = None,
    ) -> None:
        """Connect to the ranks; :meth:`start` waits until they are ready. `log_tail` shows their output.

        `on_quiet` is called once in each phase that takes longer than `QUIET` seconds.
        """
        self._on_quiet = on_quiet
        self._quiet: tuple[int, When] | None = None
        """Test and phase for which `on_quiet` was called last."""
        self._debugger = debugger
        self._log_tail = log_tail
        self.grant = grant
        self.findings = NOTHING
        """The diagnosis of the living ranks of a test that failed."""
        self.harm: str | None = None
        """Why the world must not run another test; None if it may."""
        self.worn = False
        """True if the world should not run another test, but can be shut down cleanly."""
        self.exit_request: ExitRequest | None = None
        self.extras: list[tuple[int, ExtraReport]] = []
        self._port = port
        self._serial = 0
        self._announced_ahead = False
        """True if the ranks have been sent the test to run after the present one."""
        self._began = 0.0
        self._ready: set[int] = set()
        self._reported_ends: set[int] = set()
        """Ranks whose end was returned as an outcome. The pool reports any other death."""
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
            stream = call_rank(self.grant.directory, self.grant.spec, rank, pid)
        except OSError:
            # The rank is dead. Use a closed connection, so that `_pump` finds the exit like any other.
            stream, other = socket.socketpair()
            other.close()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALLED, 0))
        connection = Connection(stream.detach())
        # For a rank on another machine, the node's bridge closes the connection when the process has ended.
        pidfd = None if self.grant.spec.is_far(rank) else prctl.end_of(pid)
        connected = _Rank(rank=rank, pid=pid, connection=connection, pidfd=pidfd)
        self._selector.register(connection, selectors.EVENT_READ, connected)
        if pidfd is not None:
            self._selector.register(pidfd, selectors.EVENT_READ, connected)
        return connected

    def start(self) -> tuple[RankOutcome, ...] | None:
        """Wait until every rank is ready for a test. Return None if all are, else the outcome of each rank.

        Raise :class:`LostWorld` if a rank of a warm world has died: the next test has nothing to do with that.
        """
        deadline = monotonic() + START_TIMEOUT
        while len(self._ready) + sum(rank.end is not None for rank in self._ranks) < self.size:
            if any(rank.end is not None for rank in self._ranks):
                deadline = min(deadline, monotonic() + GRACE)
            if not self._pump(deadline):
                unready = [rank for rank in self._ranks if rank.rank not in self._ready and not rank.done]
                spent = self._grace()._replace(seconds=GRACE)
                self._give_up(unready, f"did not become ready within {START_TIMEOUT:g} s (timeout)", spent)
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        if self.grant.warm and any(end.ending == "died" for end in ends):
            raise LostWorld
        self._reported_ends |= {end.rank for end in ends}
        return tuple(rank.end or RankOutcome(rank.rank, "passed") for rank in self._ranks) if ends else None

    @property
    def used(self) -> bool:
        """True if this driver has sent the world a test."""
        return self._serial > 0

    def send(
        self, node: NodeRef, location: Location, following: NodeRef | None, *, last: bool, ahead: bool = False
    ) -> None:
        """Have every rank run the test `node` now, instead of one that was sent ahead.

        With `ahead`, the ranks start the test by themselves once all of them have passed the present one.
        """
        if ahead:
            self._announced_ahead = True
        else:
            self._begin(monotonic())
        data = pickle.dumps(RunTest(self._serial + ahead, node, location, following, last, ahead))
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # The rank is dead, which `wait` finds in the first phase.
                rank.connection.send_bytes(data)

    @property
    def has_gone_on(self) -> bool:
        """True if the ranks have started the test that was sent ahead; known once all have finished the present one."""
        checksums = [rank.finished.checksum for rank in self._ranks if rank.finished is not None and rank.end is None]
        return self._announced_ahead and may_run_ahead(checksums, self.size)

    def switch_to_next(self) -> None:
        """Make the test that the ranks have started by themselves the present one."""
        self._begin(max(rank.reports["teardown"].at for rank in self._ranks))
        self._end_early_deaths()

    def _end_early_deaths(self) -> None:
        """End the ranks that died when it was not yet known in which test."""
        for rank in self._ranks:
            if rank.died_early is not None:
                self._end_exited(rank, rank.died_early)

    def _begin(self, now: float) -> None:
        self._serial += 1
        self._announced_ahead = False
        self._began = now
        self._debugger.begin()
        self.extras.clear()
        self.findings = NOTHING
        for rank in self._ranks:
            for message in rank.begin():
                self._handle(rank, message)

    def wait(self, when: When, timeout: float, left: float | None = None) -> tuple[RankOutcome, ...]:
        """Return how phase `when` ended on every rank, at most `timeout` seconds and a short grace after it began.

        `left` is the rest of the `timeout` if all phases of the test share it. Once a rank has failed or ended, the
        ranks that may wait for it get the grace to finish the test; a rank that does not is counted as hung, and the
        world is killed afterwards. All ranks are then waited for, so that their ends are reported with the failure.
        """
        left = timeout if left is None else left
        while pending := [rank for rank in self._ranks if not rank.settled(when)]:
            self._pump_or_give_up(pending, when, timeout, left)
        while (pending := [rank for rank in self._ranks if not rank.done]) and self._has_gone_wrong:
            # Only ranks in their teardown have its timeout; the others have the grace alone.
            in_teardown = all(rank.settled("call") for rank in pending)
            if not in_teardown and self._grace().end == math.inf:
                break  # The failure is in a teardown alone: the other ranks' phases have their own timeouts.
            self._pump_or_give_up(pending, "teardown", timeout, left if in_teardown else math.inf)
        if when == "teardown" and not self.has_gone_on:
            self._end_early_deaths()
        if self._log_tail is not None:
            self._log_tail.finish() if when == "teardown" else self._log_tail.drain()
        outcomes = tuple(rank.outcome(when) for rank in self._ranks)
        ranks = zip(self._ranks, outcomes, strict=True)
        self._reported_ends |= {rank.rank for rank, outcome in ranks if outcome is rank.end}
        return outcomes

    @property
    def _has_gone_wrong(self) -> bool:
        return any(rank.end is not None or rank.died_early is not None or rank.has_failed for rank in self._ranks)

    def _pump_or_give_up(self, pending: list[_Rank], when: When, timeout: float, left: float) -> None:
        """Wait for messages; give up `pending` after the timeout of phase `when`, or the grace after a failure."""
        if self._debugger.serve(self._locate, self._wait_for_debugger):
            return
        began = max(beginning(when, self._ranks, self._began), self._debugger.ended)
        deadline = began + left
        limit = min(deadline, self._grace().end)
        shown = self._log_tail is not None and self._log_tail.show()
        interval = 0.0 if shown else _PROGRESS_INTERVAL if self._log_tail is None else _LOG_INTERVAL
        if self._pump(min(limit, monotonic() + interval)):
            return
        noted = self._noted(self._ranks)
        # Messages that a rank sent before it noted a phase come first. Return, since `pending` may have changed.
        if self._pump(0.0) or self._apply_notes(noted):
            return
        if self._on_quiet is not None and monotonic() > began + QUIET and self._quiet != (self._serial, when):
            self._quiet = self._serial, when
            places, collectives = self._examiner.progress(_pids(rank for rank in self._ranks if rank.end is None))
            self._on_quiet(when, monotonic() - began, timeout, places, collectives)
        spent = self._grace()
        if monotonic() >= min(deadline, spent.end):
            timed_out = f"did not finish the {when} phase within {timeout:g} s (timeout)"
            self._give_up(pending, timed_out, spent if spent.end < deadline else Grace())

    def _locate(self, rank: int) -> tuple[int | None, Connect]:
        pid = self._ranks[rank].pid
        spec = self.grant.spec
        return None if spec.is_far(rank) else pid, partial(call_rank, self.grant.directory, spec, rank, pid)

    def _wait_for_debugger(self) -> bool:
        self._pump(math.inf)
        holder = self._debugger.holder
        return holder is not None and self._ranks[holder].end is None and self._ranks[holder].died_early is None

    def finished(self) -> dict[int, Finished]:
        """Return the last message of the test of each rank that reached its end."""
        return {rank.rank: rank.finished for rank in self._ranks if rank.finished is not None}

    def stacks(self) -> dict[int, str]:
        """Return the present stacks of every living rank."""
        return self._examiner.stacks(_pids(rank for rank in self._ranks if rank.end is None))

    def close(self) -> None:
        """Give the world back to the pool."""
        if self._log_tail is not None:
            self._log_tail.finish()
        for rank in self._ranks:
            rank.connection.close()
            if rank.pidfd is not None:
                os.close(rank.pidfd)
        self._selector.close()
        # Ranks that have finished their test can be shut down cleanly, even if the test has harmed the world.
        ended = all(rank.finished is not None and rank.end is None for rank in self._ranks) and not self.has_gone_on
        worn = self.worn or (self.harm is not None and ended)
        self._port.release(self.number, self.harm, frozenset(self._reported_ends), worn)

    @property
    def alive(self) -> bool:
        """True if every rank lives. Handles all pending messages and exits first."""
        while self._pump(0.0):
            pass
        return all(rank.end is None for rank in self._ranks)

    # Events

    def _noted(self, ranks: Sequence[_Rank]) -> dict[int, tuple[int, float]]:
        """Return how many phases each of `ranks` has noted as passed, and when it did so."""
        asked = self._inspector.ask(NodeInspector.progress, {one.rank: None for one in ranks})
        # Ignore notes on other tests. `serial` is not enough: an earlier driver of the world also counted from one.
        return {
            number: (passed, at)
            for number, (serial, passed, at) in asked.items()
            if serial == self._serial and at >= self._began
        }

    def _apply_notes(self, noted: Mapping[int, tuple[int, float]]) -> bool:
        """Count phases that ranks have `noted` but not reported yet as passed; return whether there were any."""
        changed = False
        for number, (passed, at) in noted.items():
            changed |= self._ranks[number].has_passed(self._serial, passed, at)
        return changed

    def _grace(self) -> Grace:
        return grace(self._ranks, self._debugger.ended, self._is_any_at_work)

    def _is_any_at_work(self) -> bool:
        return any(
            self._inspector.ask(NodeInspector.at_work, _pids(rank for rank in self._ranks if not rank.done)).values()
        )

    def _pump(self, deadline: float) -> bool:
        """Handle messages and exits, waiting for them until `deadline`; return False if there were none."""
        timeout = max(0.0, deadline - monotonic()) if deadline < math.inf else None
        events = self._selector.select(timeout)
        for key, _ in events:
            rank: _Rank = key.data
            if rank.end is not None or rank.died_early is not None:
                continue
            if key.fileobj is rank.connection:
                self._receive(rank)
            else:
                self._exited(rank)
        return bool(events)

    def _receive(self, rank: _Rank) -> None:
        try:
            self._handle_received(rank)
        except (EOFError, OSError):
            self._exited(rank)

    def _handle_received(self, rank: _Rank) -> None:
        try:
            messages = rank.connection.recv()
        except BlockingIOError:
            stack = self.stacks().get(rank.rank, "")
            self._end(rank, "hung", f"stopped in the middle of a message for {_STALLED} s", stack)
            return
        for message in messages:
            self._handle(rank, message)

    def _drain(self, rank: _Rank) -> None:
        """Handle all messages that a rank has sent until now."""
        with contextlib.suppress(EOFError, OSError):
            while rank.end is None and rank.connection.poll():
                self._handle_received(rank)

    def _handle(self, rank: _Rank, message: object) -> None:
        if rank.finished is not None and self._announced_ahead:
            rank.early.append(message)
        elif isinstance(message, Ready):
            self._ready.add(rank.rank)
        elif isinstance(message, CannotRun):
            self._end(rank, "unstarted", message.text)
        elif isinstance(message, ForkReturned):
            self._end(rank, "failed", message.text, phase=message.phase)
        elif isinstance(message, ExitRequest):
            self.exit_request = self.exit_request or message
            self._end(rank, "died", f"asked for the end of the session: {message.reason}")
        elif isinstance(message, PhaseReport) and message.serial == self._serial:
            rank.reports[message.when] = message
        elif isinstance(message, ExtraReport) and message.serial == self._serial:
            self.extras.append((rank.rank, message))
        elif isinstance(message, TerminalRequest):
            self._debugger.ask(rank.rank, message.method)
        elif isinstance(message, TerminalReturned):
            self._debugger.holder = None
        elif isinstance(message, Finished) and message.serial == self._serial:
            rank.finished = message
            self.harm = self.harm or message.harm
            self.worn = self.worn or message.worn

    # Ends of ranks

    def _end(
        self,
        rank: _Rank,
        ending: Ending,
        text: str,
        stack: str = "",
        at: float | None = None,
        *,
        phase: When | None = None,
        secondary: bool = False,
        exit: RankExit | None = None,
    ) -> None:
        """Record that `rank` has ended in `phase`, and receive no more messages from it.

        If `phase` is None, the rank has ended in the first phase that it has not noted as passed.
        """
        before = len(PHASES) if phase is None else PHASES.index(phase)
        self._apply_notes({number: (min(passed, before), at) for number, (passed, at) in self._noted([rank]).items()})
        log = self._inspector.ask(NodeInspector.logs, {rank.rank: None}).get(rank.rank, "") if ending != "hung" else ""
        captured = self._inspector.ask(NodeInspector.captured, {rank.rank: rank.phase}).get(rank.rank, [])
        at = monotonic() if at is None else at
        rank.end = RankOutcome(rank.rank, ending, at, None, text, stack, log, tuple(captured), secondary, exit=exit)
        self._unregister(rank)
        self.harm = self.harm or f"rank {rank.rank} {text}"

    def _unregister(self, rank: _Rank) -> None:
        for source in (rank.connection, rank.pidfd):
            if source is not None and source in self._selector.get_map():
                self._selector.unregister(source)

    def _exited(self, rank: _Rank) -> None:
        """Handle the exit of a rank's process, or the end of its connection."""
        if rank.end is not None:
            return
        now = monotonic()
        self._drain(rank)
        if self._announced_ahead and rank.finished is not None and rank.finished.checksum is not None:
            # The rank died in this test or in the next one; all ranks have to finish this test to tell which.
            rank.died_early = now
            self._unregister(rank)
        else:
            self._end_exited(rank, now)

    def _end_exited(self, rank: _Rank, at: float) -> None:
        if rank.end is not None:
            return  # The rank had sent the reason.
        others = [other for other in self._ranks if other is not rank and not other.done and other.died_early is None]
        if others and self._serial and all(other.end is None for other in self._ranks):
            self.findings = self._examiner.at_death(_pids(others))
        end = self._port.rank_exit(self.number, rank.rank, _EXIT_STATUS_TIMEOUT)
        text = "lost its connection to the driver (exit status unknown)"
        if end is not None:
            before, self._oom_kills = self._oom_kills, self._count_oom_kills()
            end = with_memory(end, before.get(rank.rank), self._oom_kills.get(rank.rank))
            text = describe_exit(end)
        self._end(rank, "died", text, at=at, exit=end)

    def _count_oom_kills(self) -> dict[int, int | None]:
        return self._inspector.ask(NodeInspector.oom_kills, dict.fromkeys(range(self.size)))

    def _give_up(self, pending: list[_Rank], timed_out: str, spent: Grace) -> None:
        """Take the stacks of the ranks `pending`, and count these ranks as hung.

        `timed_out` says what they did not do in time. If a grace is over instead, `spent` is that grace.
        """
        alive = _pids(rank for rank in self._ranks if rank.end is None)
        # Native frames take seconds to collect. After a death or failure they are not needed: the cause is known.
        fine = [rank for rank in self._ranks if rank.end is None and not rank.has_failed]
        thoroughly = len(fine) == self.size
        stacks, self.findings = self._examiner.hung(alive, _pids(pending), thoroughly=thoroughly)
        for rank in pending:
            stack = stacks.get(rank.rank, "")
            text = f"was terminated {spent.seconds:g} s after {spent.cause}" if spent.cause else timed_out
            self._end(rank, "hung", text, stack, secondary=bool(spent.cause))


def _pids(ranks: Iterable[_Rank]) -> dict[int, int]:
    return {rank.rank: rank.pid for rank in ranks}
