"""The run of a marked test in a world, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from pytest_accel.compat.pytest_shims import wider_fixtures
from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import folders_of
from pytest_accel.core.stash_keys import NOT_TORN_DOWN
from pytest_accel.core.truncation import ranks_text
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.diagnostics.source_lines import stack_text
from pytest_accel.diagnostics.waiting_limits import TimeLimits
from pytest_accel.driver.marked_test import MarkedTest
from pytest_accel.driver.world import World
from pytest_accel.messages.rank_messages import When
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.verdict import expected_ends, merged_subtests, remote_exceptions
from pytest_accel.verdict.judgement import Phase, judge
from pytest_accel.verdict.phase_verdict import Verdict, publish

if TYPE_CHECKING:
    from pytest_accel.driver.driver import Driver


class WorldRun:
    """The run of a marked test in a world. The test's `MarkedItem` makes one when pytest sets the test up."""

    def __init__(self, test: MarkedTest, driver: Driver, limits: TimeLimits) -> None:
        """Start the test in a world of the `driver`."""
        __tracebackhide__ = True
        self._test = test
        self._driver = driver
        self._limits = limits
        self._folders = folders_of(test.item.config)
        self._subtests: list[dict[str, Any]] = []
        """The merged reports of subtests that have not been sent to pytest, serialized as pytest does it."""
        self._outcomes: dict[When, str] = {}
        """The outcomes of the phases so far."""
        self._ended_ranks: frozenset[int] = frozenset()
        """Ranks whose end has been reported with a phase."""
        self._world: World | None = None
        self.spec: WorldSpec
        """The world in which the test was started. It stays known when the world has been given back."""
        self._start()

    @property
    def has_world(self) -> bool:
        """True until the last phase has ended or the driver has given the world back."""
        return self._world is not None and not self._world.closed

    def take_subtests(self) -> list[dict[str, Any]]:
        """Return the merged reports of subtests, and forget them."""
        taken, self._subtests = self._subtests, []
        return taken

    def phase(self, when: When) -> Verdict:
        """Wait for phase `when`, and return its verdict."""
        __tracebackhide__ = True
        try:
            verdict = self._judge(when)
        finally:
            if when == "teardown":
                self._world = None
        self._outcomes[when] = verdict.outcome
        publish(verdict, self._test.item)
        return verdict

    def _start(self) -> None:
        __tracebackhide__ = True
        began = monotonic()
        self._world = self._driver.begin(self._test)
        self._limits.leave_out(began)
        self._ended_ranks = frozenset()
        self.spec = self._world.grant.spec
        # For junit files and report hooks.
        self._add_properties([*self._world.properties, ("accel_wait", round(self._world.take_wait(), 3))])

    def _judge(self, when: When) -> Verdict:
        """Wait for phase `when` in the current world, and return its verdict."""
        __tracebackhide__ = True
        world = self._world
        assert world is not None
        outcomes = self._wait(world, when)
        if when == "call":
            outcomes = expected_ends.marked(outcomes, world.announced)
        phase = Phase(
            when=when,
            outcomes=outcomes,
            place=self._test.place,
            about=self._test.key.about,
            is_fake=self._test.key.fake_size is not None,
            folders=self._folders,
            findings=world.monitor.findings,
            failed_before="failed" in self._outcomes.values(),
            ended_before=self._ended_ranks if when == "teardown" else frozenset(),
            finished=world.finished() if when == "teardown" else {},
            leaks=self._driver.settings.leaks,
            announced=world.announced,
        )
        # Subtests of a setup that passed are reported with the call phase, which follows.
        has_ended = when != "setup" or any(outcome.ending != "passed" for outcome in outcomes)
        if has_ended and (extras := world.monitor.take_extras(when)):
            reports = merged_subtests.merge(extras, phase)
            self._subtests += reports
            phase = structs.replace(phase, failed_subtests=merged_subtests.failed_numbers(reports))
        verdict = judge(phase)
        # Warning filters may turn leaks into errors, which change the verdict.
        if leak_errors := remote_exceptions.warn(verdict.leak_warnings, phase.place):
            verdict = judge(structs.replace(phase, leak_errors=leak_errors))
        world.monitor.rule_out(verdict.kill_reason, retire=verdict.retire)
        if when == "teardown" and not world.monitor.reusable and (errors := world.tear_down()):
            self._end_session_if_requested(world)
            verdict = judge(structs.replace(phase, leak_errors=leak_errors, late_errors=errors))
        if when == "teardown" and (lost := world.not_torn_down) and (fixtures := wider_fixtures(self._test.item)):
            self._add_properties([(NOT_TORN_DOWN, f"{', '.join(fixtures)} ({ranks_text(lost)})")])
        self._ended_ranks |= verdict.ended_ranks
        self._add_properties(verdict.properties)
        return verdict

    def _wait(self, world: World, when: When) -> Sequence[RankOutcome]:
        """Return the ranks' outcomes of phase `when`. End the world if the wait is interrupted."""
        __tracebackhide__ = True
        item = self._test.item
        try:
            outcomes = world.wait(when, self._limits.of_phase())
        except KeyboardInterrupt:
            self._driver.interrupt()
            raise
        except BaseException as error:
            # After another plugin's timeout the ranks still run.
            for rank, stack in world.monitor.stacks().items():
                item.add_report_section(when, f"stacks [rank {rank}]", stack_text(stack, self._folders))
            self._driver.end_world(f"the driver stopped waiting ({type(error).__name__})")
            raise
        self._end_session_if_requested(world)
        return outcomes

    def _end_session_if_requested(self, world: World) -> None:
        if world.monitor.exit_request is not None:
            self._driver.end_session(world.monitor.exit_request, self._test.item.nodeid)

    def _add_properties(self, properties: Iterable[tuple[str, object]]) -> None:
        own = self._test.item.user_properties
        for one in properties:
            if one not in own:
                own.append(one)
