"""The run of a marked test in a world, phase by phase, and its retry after a failure outside of the test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import folders_of
from pytest_accel.core.rank_messages import Finished, When
from pytest_accel.core.stash_keys import RETRIED, SLOW_IMPORTS
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.diagnostics.rank_state import PHASES, RankOutcome
from pytest_accel.diagnostics.source_lines import stack_text
from pytest_accel.diagnostics.waiting_limits import TimeLimits
from pytest_accel.driver.marked_test import MarkedTest
from pytest_accel.driver.subtests import Subtests
from pytest_accel.driver.world import World
from pytest_accel.verdict import expected_ends, merged_subtests, remote_exceptions, sentences
from pytest_accel.verdict.judgement import Phase, judge
from pytest_accel.verdict.phase_verdict import Verdict, publish

if TYPE_CHECKING:
    from pytest_accel.driver.driver import Driver


class WorldRun:
    """The run of a marked test in a world. The test's `MarkedItem` makes one when pytest sets the test up.

    With ``accel_retry_dead``, the test is retried once in another world if it failed for a reason outside of it.
    """

    def __init__(self, test: MarkedTest, driver: Driver, limits: TimeLimits, subtests: Subtests) -> None:
        """Start the test in a world of the `driver`. Reports of subtests are added to `subtests`."""
        __tracebackhide__ = True
        self._test = test
        self._driver = driver
        self._limits = limits
        self._subtests = subtests
        self._retried = False
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
        """False after the last phase, and if the driver has given the world back before."""
        return self._world is not None and not self._world.closed

    def phase(self, when: When) -> Verdict:
        """Wait for phase `when`, and return its verdict. If the world fails, retry the test up to this phase."""
        __tracebackhide__ = True
        try:
            verdict = self._judge_or_retry(when)
        finally:
            if when == "teardown":
                self._world = None
        self._outcomes[when] = verdict.outcome
        publish(verdict, self._test.item)
        return verdict

    def _judge_or_retry(self, when: When) -> Verdict:
        """Return the verdict on phase `when`; after a retry, on the first phase that did not pass if it is earlier."""
        __tracebackhide__ = True
        verdict = self._judge(when)
        if verdict.outside_cause is not None and self._may_retry(when):
            self._retried = True
            self._add_properties([(RETRIED, sentences.retried(verdict.message, verdict.outside_cause))])
            self._subtests.clear()
            self._start()
            for phase in PHASES:
                verdict = self._judge(phase)
                if phase == when or verdict.outcome != "passed":
                    break
                self._subtests.clear()  # This phase of the first run has been reported, with its subtests.
        return verdict

    def _may_retry(self, when: When) -> bool:
        """Return True if the test may be retried: all phases before `when` have passed, and it has not been retried.

        A session under a launcher ends after the loss of a machine.
        """
        if not self._driver.settings.retry_dead or self._test.item.session.shouldfail:
            return False
        passed = all(self._outcomes.get(phase) == "passed" for phase in PHASES[: PHASES.index(when)])
        return passed and not self._retried

    def _start(self) -> None:
        __tracebackhide__ = True
        began = monotonic()
        self._world = self._driver.begin(self._test)
        self._limits.leave_out(began)
        self._ended_ranks = frozenset()
        spec = self.spec = self._world.grant.spec
        # For junit files and report hooks.
        self._add_properties(
            [("accel_host", ",".join(self._world.grant.hosts)), ("accel_wait", round(self._world.take_wait(), 3))]
        )
        if spec.grouped:
            self._add_properties([("accel_ranks", spec.ranks)])
        if spec.key.fake_size is not None:
            self._add_properties([("accel_fake_ranks", spec.key.fake_size)])
        if spec.devices:
            self._add_properties([("accel_devices", ",".join(device.id for device in spec.devices))])

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
            folders=folders_of(self._test.item.config),
            findings=world.findings,
            failed_before="failed" in self._outcomes.values(),
            ended_before=self._ended_ranks if when == "teardown" else frozenset(),
            finished=world.finished() if when == "teardown" else {},
            leaks=self._driver.settings.leaks,
            announced=world.announced,
        )
        # Subtests of a setup that passed are reported with the call phase, which follows.
        if when != "setup" or any(outcome.ending != "passed" for outcome in outcomes):
            reports = merged_subtests.merge(world.take_extras(when), phase)
            self._subtests.add(reports)
            phase = structs.replace(phase, failed_subtests=merged_subtests.failed_numbers(reports))
        verdict = judge(phase)
        if leak_errors := remote_exceptions.warn(verdict.leak_warnings, phase.place):
            verdict = judge(structs.replace(phase, leak_errors=leak_errors))
        world.condition.rule_out(verdict.kill_reason, retire=verdict.retire)
        self._ended_ranks |= verdict.ended_ranks
        self._add_properties(verdict.properties)
        if slow := _slow_imports(phase.finished):
            self._add_properties([(SLOW_IMPORTS, slow)])
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
            folders = folders_of(item.config)
            for rank, stack in world.stacks().items():
                item.add_report_section(when, f"stacks [rank {rank}]", stack_text(stack, folders))
            self._driver.end_world(f"the driver stopped waiting ({type(error).__name__})")
            raise
        if world.exit_request is not None:
            self._driver.end_session(world.exit_request, item.nodeid)
        return outcomes

    def _add_properties(self, properties: Iterable[tuple[str, object]]) -> None:
        own = self._test.item.user_properties
        for one in properties:
            if one not in own:
                own.append(one)


def _slow_imports(finished: Mapping[int, Finished]) -> dict[str, dict[str, float]]:
    """Return the slow imports of all ranks, by package and module, with the longest time of any rank."""
    slow: dict[str, dict[str, float]] = {}
    for left in finished.values():
        for package, modules in left.slow_imports.items():
            merged = slow.setdefault(package, {})
            for name, seconds in modules.items():
                merged[name] = max(seconds, merged.get(name, 0.0))
    return slow
