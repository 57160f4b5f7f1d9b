"""The driver's connection to a world: sends tests to the ranks, and collects their outcomes phase by phase."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial

from pytest_accel.core.clock import COLLECTION_TIMEOUT, GRACE, RETIRE_TIMEOUT, START_TIMEOUT, monotonic
from pytest_accel.core.node_refs import NodeRef, TestFamily
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.rank_state import Ending, Grace, Hang, HangCause, RankOutcome
from pytest_accel.diagnostics.waiting_limits import PhaseLimit, beginning, grace
from pytest_accel.driver.debugger_relay import DebuggerRelay
from pytest_accel.driver.item_plan import MarkedTest
from pytest_accel.driver.link_to_rank import LinkToRank
from pytest_accel.driver.output_tail import OutputTail
from pytest_accel.driver.rank_monitor import RankMonitor
from pytest_accel.messages.rank_messages import (
    Announced,
    Collected,
    CollectFile,
    Command,
    DriverRequest,
    Finished,
    RunTest,
    When,
)
from pytest_accel.messages.struct_messages import encode, frame
from pytest_accel.pool.pool_client import GiveBackWorld, PoolClient, WorldGrant
from pytest_accel.verdict import expected_ends, sentences
from pytest_accel.verdict.causes import error_consequence
from pytest_accel.verdict.sentences import COULD_RUN

_INTERVAL = 0.2
"""Seconds between two looks at ranks that send nothing: whether they were held up, and whether a time is over."""
_LONGEST_EXTENSION = 7.0
"""Maximum number of seconds by which the grace after a failure is extended on a busy machine."""
_OUTPUT_INTERVAL = 0.05
"""Seconds between two reads of the ranks' output, if it is shown while the test runs."""


class World:
    """The ranks of a grant, as the driver uses them. Owned by the `Driver`; not thread-safe."""

    def __init__(
        self, grant: WorldGrant, pool_client: PoolClient, debugger: DebuggerRelay, tail: OutputTail | None = None
    ) -> None:
        """Connect to the ranks; :meth:`start` waits until they are ready. `tail` shows their output."""
        self._debugger = debugger
        self._tail = tail
        self._output_due = 0.0
        """Time at which the ranks' output is read next (`clock.monotonic`)."""
        self.grant = grant
        self.waited = grant.waited
        """Seconds that the driver's first test waited for devices or CPU slots; 0 for each later test."""
        self.closed = False
        """True once the world has been given back to the pool."""
        self.interrupted: str | None = None
        """The test during which the session was interrupted, empty if it is unknown; None without an interrupt."""
        self._pool_client = pool_client
        self._held_up = 0.0
        """Seconds by which the grace is extended, because the ranks could not use it."""
        self._families: dict[str, frozenset[TestFamily]] = {}
        """The families of tests that all ranks have collected, by path of the file."""
        self._not_expected: set[NodeRef] = set()
        """The collected tests that have marks ``xfail``, if no rank applies any of these marks."""
        self.refused = False
        """True if a rank cannot run the current test, which is then not sent to the ranks."""
        self._busy = False
        """True from the request to collect a file to its answer, and once a test has been sent."""
        self.used = False
        """True if this driver has sent the world a test."""
        self._reported_ends: set[int] = set()
        """Ranks whose end was returned as an outcome. The pool reports any other death."""
        self.monitor = RankMonitor(grant, pool_client, debugger)
        self._ranks = self.monitor.ranks

    @cached_property
    def properties(self) -> Sequence[tuple[str, object]]:
        """The properties of each test of this world; made once, since the reports of all tests keep them."""
        spec = self.grant.spec
        found: list[tuple[str, object]] = [("accel_host", ",".join(self.grant.hosts))]
        if spec.key.grouped:
            found.append(("accel_ranks", spec.ranks))
        if spec.key.fake_size is not None:
            found.append(("accel_fake_ranks", spec.key.fake_size))
        if spec.devices:
            found.append(("accel_devices", ",".join(device.id for device in spec.devices)))
        return found

    @property
    def number(self) -> int:
        return self.grant.spec.world

    def start(self) -> bool:
        """Wait until every rank is ready for a test. If one is not, the outcome of the test's setup says why.

        Return False if a rank of a warm world has died: the test has nothing to do with that, and gets another world.
        """
        self.monitor.begin(monotonic())
        self._await(self._is_ready, Hang(HangCause.START_TIMEOUT, START_TIMEOUT))
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        if self.grant.warm and any(end.ending == "died" for end in ends):
            return False
        if ends:
            self._refuse()
        return True

    def fits(self, key: WorldKey) -> bool:
        """Return whether a test with `key` may use this world next, as far as is known."""
        return key == self.grant.spec.key and self.monitor.reusable and not (key.fresh and self.used)

    def has_collected(self, node: NodeRef) -> bool:
        """Return whether all ranks are known to have the test `node`."""
        return node.family in self._families.get(node.path, ())

    def collect(self, request: CollectFile) -> None:
        """Have every rank collect the file of the requested test.

        The time that this takes, for example for imports, is no part of any limit of the test. If a rank cannot run
        the test, the outcome of its setup says why.
        """
        self.monitor.begin(monotonic())
        self._busy = True
        self._send(request)
        hang = Hang(HangCause.COLLECTION_TIMEOUT, COLLECTION_TIMEOUT)
        self._await(lambda rank: rank.collected is not None, hang)
        self._busy = False
        answers = [rank.collected for rank in self._ranks if rank.end is None and rank.collected is not None]
        if len(answers) == len(self._ranks) and self._prepare(answers):
            self._families[request.node.path] = frozenset.intersection(*(answer.families for answer in answers))
            self._not_expected |= frozenset.intersection(*(answer.unexpected for answer in answers))
            if not any(answer.problem for answer in answers):
                return
            # Ranks that have no test of the file have stopped in the middle of it: no other test meets them.
            self.monitor.rule_out(retire=not all(answer.families for answer in answers))
        self._refuse()

    def _refuse(self) -> None:
        """Record that the test is not sent to the ranks, since a rank cannot run it."""
        self.refused = True
        for rank in self._ranks:
            problem = None if rank.collected is None else rank.collected.problem
            ending: Ending = "unstarted" if problem else "passed"
            text, headline = (problem.text, problem.headline) if problem else ("", COULD_RUN)
            rank.not_run = RankOutcome(rank.rank, ending, monotonic(), text=text, headline=headline)

    def _prepare(self, answers: Sequence[Collected]) -> bool:
        """Have the ranks prepare for tests if they have not; return whether all have done so.

        If a rank has no test of the file, all ranks are retired, and need not prepare.
        """
        if not all(answer.prepared for answer in answers) and all(answer.families for answer in answers):
            self._busy = True
            self.monitor.ready.clear()
            self._send(Command.PREPARE)
            self._await(self._is_ready, Hang(HangCause.START_TIMEOUT, START_TIMEOUT))
            self._busy = False
        return all(rank.end is None for rank in self._ranks)

    def _is_ready(self, rank: LinkToRank) -> bool:
        return rank.rank in self.monitor.ready

    @property
    def hung_in_collection(self) -> bool:
        """True if a rank did not collect a file in time."""
        hangs = [rank.end.hang for rank in self._ranks if rank.end is not None]
        return any(hang is not None and hang.cause is HangCause.COLLECTION_TIMEOUT for hang in hangs)

    def expects_failure(self, node: NodeRef) -> bool:
        """Return False if the collected test `node` has marks xfail, and none of them applies in any rank."""
        return node not in self._not_expected

    def _await(self, is_ready: Callable[[LinkToRank], bool], hang: Hang) -> None:
        """Wait until each living rank is ready; count ranks that are not ready in time as hung."""
        self._held_up = 0.0
        began, limit = monotonic(), hang.seconds
        while pending := [rank for rank in self._ranks if rank.end is None and not is_ready(rank)]:
            # Once a rank has ended, the others have only the grace time, since they may wait for it.
            if limit == hang.seconds and any(rank.end is not None for rank in self._ranks):
                began, limit = monotonic(), GRACE
            looked, deadline = monotonic(), began + limit + self._held_up
            if self.monitor.pump(min(deadline, looked + self._show_output())):
                continue
            if looked >= deadline:
                found = self._grace()
                self.monitor.record_hung(pending, hang if found is None else found[1]._replace(seconds=GRACE))
            elif limit == GRACE:
                self._extend_grace(looked)

    def send(self, marked: MarkedTest) -> None:
        """Have every rank run the test now; no-op if a rank cannot run it.

        One message is for all phases. Ranks that waited for a message before the call would leave it out if a hook of
        the driver has failed by then; but each wait makes processes take turns, and costs up to a fifth of a test.
        """
        if self.refused:
            return
        self.used = self._busy = True
        self.monitor.begin(monotonic())
        following = None if marked.following is None else marked.following.node
        serial, item = self.monitor.serial, marked.item
        names = item.name, item.nodeid
        self._send(RunTest(serial, marked.node, item.location, following, marked.last, names))

    def _send(self, message: DriverRequest, ranks: Sequence[LinkToRank] | None = None) -> None:
        """Send `message` to the living ranks, or only to `ranks`."""
        data = frame(encode(message))
        for rank in self._ranks if ranks is None else ranks:
            if rank.end is None:
                rank.send(data)

    def wait(self, when: When, limit: PhaseLimit) -> Sequence[RankOutcome]:
        """Return how phase `when` ended on every rank, at the end of `limit` and a short grace at the latest.

        Once a rank has failed or ended, the ranks that may wait for it have a grace time to finish the test; a rank
        that does not is counted as hung, and the world is killed afterwards.
        """
        if not all(rank.finished for rank in self._ranks):  # Nearly all waits have ended with that of the setup.
            self._wait(when, limit)
        if self._tail is not None:
            self._tail.drain([rank.rank for rank in self._ranks if rank.finished or rank.end])
        outcomes = []
        for rank in self._ranks:
            outcomes.append(rank.outcome(when))
            if outcomes[-1] is rank.end:
                self._reported_ends.add(rank.rank)
        return outcomes

    def _wait(self, when: When, limit: PhaseLimit) -> None:
        """Do what `wait` says, for a test that a rank has not finished."""
        self._held_up = 0.0
        if when == "setup" and self._tail is None and self._ends_soon(limit):
            return
        while pending := [rank for rank in self._ranks if not rank.settled(when)]:
            self._pump_or_give_up(pending, when, limit)
        # After a failure, wait for all ranks, to report their ends with the failure.
        while self._any_failed_or_ended and (pending := [rank for rank in self._ranks if not rank.done]):
            # Only ranks in their teardown have its timeout; the others have the grace alone.
            in_teardown = all(rank.settled("call") for rank in pending)
            if not in_teardown and self._grace() is None:
                break  # The failure is in a teardown alone: the other ranks' phases have their own timeouts.
            self._pump_or_give_up(pending, "teardown", limit if in_teardown else limit._replace(rest=math.inf))

    def _ends_soon(self, limit: PhaseLimit) -> bool:
        """Wait for the end of the test; return False after `_INTERVAL`.

        pytest's work for all phases is then done at once. After each wait for ranks, this process has to wait for a
        processor, and finds their data in its caches: with a wait in each phase, that work takes 1.2 times as long.
        """
        end = monotonic() + min(_INTERVAL, limit.rest)
        for rank in self._ranks:
            while not rank.done:
                if monotonic() >= end:
                    return False
                self.monitor.pump(end)
        return True

    @property
    def _any_failed_or_ended(self) -> bool:
        ranks = [rank for rank in self._ranks if rank.end is not None or rank.has_failed]
        return bool(ranks) and any(rank in ranks for rank in self._unexpected)

    @property
    def announced(self) -> list[Announced]:
        """The announcements of each rank in the current test."""
        return [rank.announced for rank in self._ranks]

    @property
    def _unexpected(self) -> list[LinkToRank]:
        """All ranks except those whose call ended as all ranks have announced: nobody waits for these in vain."""
        if not (ends := expected_ends.agreed(self.announced)):
            return self._ranks
        settled = {rank.rank: rank.outcome("call") for rank in self._ranks if rank.settled("call")}
        expected = {rank for rank, outcome in settled.items() if expected_ends.is_expected(outcome, ends)}
        return [rank for rank in self._ranks if rank.rank not in expected]

    def _pump_or_give_up(self, pending: list[LinkToRank], when: When, limit: PhaseLimit) -> None:
        """Wait for messages; count `pending` as hung after the `limit` of phase `when`, or the grace of a failure."""
        if self._debugger.serve(self._ranks, partial(self.monitor.pump, math.inf)):
            return
        interval = self._show_output()
        looked = monotonic()
        # Look for messages before the times: nearly each wait ends here, and this process may have been delayed.
        if self.monitor.pump(looked + min(interval, limit.rest)):
            return
        began = max(beginning(when, self._ranks, self.monitor.began), self._debugger.ended)
        deadline = limit.deadline(began)
        end, hang = deadline, Hang(HangCause.PHASE_TIMEOUT, limit.timeout, when)
        found = self._grace()
        if found is not None and found[0] < deadline:
            end, hang = found
        if monotonic() >= end:
            if not self.monitor.pump(0.0):
                self.monitor.record_hung(pending, hang)
        elif found is not None:
            self._extend_grace(looked)
        elif (
            not self._any_failed_or_ended
            and not expected_ends.agreed(self.announced)
            and self.monitor.finds_deadlock(deadline)
        ):
            unfinished = [rank for rank in self._ranks if not rank.done]
            self.monitor.record_hung(unfinished, Hang(HangCause.DEADLOCK, 0.0, when))

    def _show_output(self) -> float:
        """Show the next output of the ranks if that is due; return the seconds until it is due again."""
        if self._tail is None:
            return _INTERVAL
        now = monotonic()
        if now >= self._output_due:
            self._output_due = now if self._tail.show() else now + _OUTPUT_INTERVAL
        return self._output_due - now

    def _extend_grace(self, since: float) -> None:
        """Extend the grace by the time since `since` if ranks waited for a processor, or this process itself did."""
        passed = monotonic() - since
        lost = passed if self.monitor.is_any_held_up() else max(0.0, passed - 2 * _INTERVAL)
        self._held_up = min(self._held_up + lost, _LONGEST_EXTENSION)

    def finished(self) -> dict[int, Finished]:
        """Return the last message of the test of each rank that reached its end."""
        return {rank.rank: rank.finished for rank in self._ranks if rank.finished is not None}

    def tear_down(self) -> list[str]:
        """Have the ranks that have finished the test tear down all fixtures, since the world runs no further test.

        Return a text for each error, and for each rank that has died or hung in this. A fixture that waits for a rank
        that has ended has the grace time, and its lost connection to that rank is no error.
        """
        has_lost = any(rank.end is not None for rank in self._ranks)
        tearing = [rank for rank in self._ranks if rank.end is None and rank.finished is not None]
        self._send(Command.TEAR_DOWN, tearing)
        hang = Hang(HangCause.PHASE_TIMEOUT, RETIRE_TIMEOUT, "teardown")
        self._await(lambda rank: rank not in tearing or rank.torn_down is not None, hang)
        ended = [rank for rank in tearing if rank.end is not None]
        self._reported_ends |= {rank.rank for rank in ended}
        errors = {
            rank.rank: rank.torn_down.text
            for rank in tearing
            if rank.torn_down is not None and rank.torn_down.error is not None
            if not (has_lost and error_consequence(rank.torn_down.error))
        }
        errors |= {
            rank.rank: sentences.describe_end(rank.end, named=False)
            for rank in ended
            if rank.end is not None and not (has_lost and rank.end.secondary)
        }
        return sentences.late_teardowns(errors)

    @property
    def not_torn_down(self) -> list[int]:
        """The ranks that have died, or hang in C code and are killed, without having finished the test."""
        ended = [rank for rank in self._ranks if self.used and rank.end is not None and rank.finished is None]
        # If a rank has reacted, ranks in C code that wait for it usually fail, too, and have time to tear down.
        return [] if any(rank.interrupted for rank in ended) else [rank.rank for rank in ended]

    def close(self) -> None:
        """Give the world back to the pool, which kills it if its ranks still run a test."""
        self.closed = True
        with ExitStack() as stack:  # Return the world after any error.
            stack.callback(self._release)
            stack.callback(self.monitor.close)
            if self._tail is not None:
                stack.callback(self._tail.drain, range(len(self._ranks)))

    def _release(self) -> None:
        # Ranks that have finished their test can be shut down cleanly, even if they must be killed otherwise.
        ended = all(rank.finished is not None and rank.end is None for rank in self._ranks)
        kill_reason = self.monitor.kill_reason
        if kill_reason is None and self._busy and not all(rank.done for rank in self._ranks):
            kill_reason = "its driver stopped waiting"  # For example, a plugin has called pytest.exit.
        retire = self.monitor.retire or (kill_reason is not None and ended)
        noticed = frozenset(self._reported_ends)
        self._pool_client.give_back(GiveBackWorld(self.number, kill_reason, noticed, retire, self.interrupted))

    @property
    def alive(self) -> bool:
        """True if every rank lives. Handles all pending messages and exits first."""
        while self.monitor.pump(0.0):
            pass
        return all(rank.end is None for rank in self._ranks)

    def _grace(self) -> Grace | None:
        """Return the grace of the ranks that have not finished; None if no rank waits in vain."""
        found = None
        if self._any_failed_or_ended:
            found = grace(self._unexpected, self._debugger.ended, self.monitor.is_any_computing)
        if found is None:
            found = expected_ends.announced_hang(self._ranks, self.announced)
        return None if found is None else (found[0] + self._held_up, found[1])
