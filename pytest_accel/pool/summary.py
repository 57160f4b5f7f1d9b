"""Errors and notes about worlds that the session's terminal summary shows in addition to the reports of tests."""

from __future__ import annotations

import signal
from dataclasses import replace

from pytest_accel.core.clock import monotonic
from pytest_accel.core.truncation import LAST_OUTPUT
from pytest_accel.diagnostics.collectives import waiting_in
from pytest_accel.diagnostics.diagnosis import Examiner, Interrupted, OutsideError, RankProblem
from pytest_accel.diagnostics.inspector import MachineInspector, WorldInspector
from pytest_accel.diagnostics.python_stacks import frames_of_rank, split_fault, where
from pytest_accel.messages.rank_exit import RankExit, exited
from pytest_accel.messages.rank_messages import FAILED_BY_HOOK, When
from pytest_accel.pool.pooled_world import RETIRE_TIMEOUT, PooledWorld


class PoolSummary:
    """Errors that belong to no test, notes, and the tests that were interrupted. Owned by the pool."""

    def __init__(self, directory: str) -> None:
        """`directory` is the session's private folder."""
        self.errors: list[str | RankProblem] = []
        """Errors that belong to no test, such as an error in the teardown of a session fixture."""
        self.notes: list[str] = []
        """Lines to show with ``-v``."""
        self._interrupted: dict[int, Interrupted] = {}
        """By world number."""
        self._directory = directory

    @property
    def interrupted(self) -> list[Interrupted]:
        """The tests that ran when the session was interrupted."""
        return list(self._interrupted.values())

    def add_note(self, text: str) -> None:
        """Show `text` with ``-v``, once: several fork servers may send the same note."""
        if text not in self.notes:
            self.notes.append(text)

    def add_failed_teardown(self, world: PooledWorld, rank: int, end: RankExit) -> None:
        """Report that a rank of a retiring world has not ended its session, or that its session has failed."""
        if end == exited(FAILED_BY_HOOK):
            self.add_problem(OutsideError.FAILED_BY_HOOK, world, rank)
        elif end != exited(-signal.SIGKILL) or world.kill_at is None or monotonic() < world.kill_at:
            self.add_problem(OutsideError.DIED_IN_TEARDOWN, world, rank, end)
        else:  # SIGKILL after `kill_at`: the session killed the rank.
            self.add_problem(OutsideError.NOT_ENDED, world, rank, stack=world.stacks.get(rank, ""))

    def add_interrupted(self, world: PooledWorld, test: str) -> None:
        """Record where the ranks of a world are in an interrupted session; a later call only adds the test.

        An empty `test` means that the test is unknown. No record is made if the world then proves to be between tests.
        """
        recorded = self._interrupted.get(world.spec.world)
        if recorded is not None:
            if test and not recorded.test:
                self._interrupted[world.spec.world] = replace(recorded, test=test)
            return
        ends = dict(world.exits)
        examiner = Examiner(self._directory, world.spec)
        stacks, findings = examiner.hung(world.alive, world.alive)
        idle = all(stack and where(frames_of_rank(stack)) is None for stack in stacks.values())
        between_tests = not test and not ends and idle
        if between_tests and not any(waiting_in(record) for record in findings.records.values()):
            return
        self._interrupted[world.spec.world] = Interrupted(test, ends, stacks, findings)

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
