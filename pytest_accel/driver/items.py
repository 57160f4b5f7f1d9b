"""Redirects the phases of a marked item to its world, and puts the ranks' merged report in place of the item's own.

A `MarkedItem` stays with its item, and makes a `WorldRun` each time that the test runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from traceback import format_exc
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pytest_accel.compat.pytest_shims import wider_fixtures
from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import folders_of
from pytest_accel.core.marks import Marks
from pytest_accel.core.stash_keys import CAUSE, MARKED, NOT_RUN, NOT_TORN_DOWN, VARIANT
from pytest_accel.core.truncation import ranks_text
from pytest_accel.diagnostics.python_stacks import stack_text
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.diagnostics.waiting_limits import TimeLimits
from pytest_accel.driver import repro_command
from pytest_accel.driver.item_hooks import redirected
from pytest_accel.driver.item_plan import ItemPlan, MarkedTest
from pytest_accel.driver.skip_conditions import condition_of, mentions_ranks
from pytest_accel.driver.world import World
from pytest_accel.messages.rank_messages import When
from pytest_accel.verdict import expected_ends, merged_subtests, phase_verdict
from pytest_accel.verdict.judgement import Phase, judge, plain_pass, reported_ends, text_longrepr
from pytest_accel.verdict.phase_verdict import Verdict

if TYPE_CHECKING:
    from pytest_accel.driver.driver import Driver


def marked_of(item: pytest.Item | pytest.Collector) -> MarkedItem | None:
    """Return the `MarkedItem` of `item`, or None if it has no marks of the plugin."""
    marked: MarkedItem | None = item.stash.get(MARKED, None)
    return marked


class MarkedItem(MarkedTest):
    """The phases that replace the phases of a marked item, and the hooks of its reports. Stored in the item's stash."""

    def __init__(self, item: pytest.Item, marks: Marks, plan: ItemPlan, driver: Driver) -> None:
        super().__init__(item, marks, plan)
        self.limits = TimeLimits(plan.timeout or driver.settings.timeout)
        self._driver = driver
        self._run: WorldRun | None = None
        """The last run of the test, or None if it has not begun."""
        self._verdicts: dict[str, Verdict] = {}
        self._failed_in_merge = False
        """True if a plugin that merged the ranks' data has failed the phase's report."""

    def install(self) -> None:
        """Give the item a class whose phases are methods of this object.

        With ``--setup-plan`` do so only for a test that cannot run: pytest shows the fixtures and sets up none.
        """
        self.item.stash[MARKED] = self
        if getattr(self.item.config.option, "setupplan", False) and self.missing is None:
            return
        for name in ("setup", "runtest", "teardown", "repr_failure"):
            vars(self.item).pop(name, None)  # A plugin may have replaced the method, also in the original of a copy.
        self.item.__class__ = redirected(type(self.item))

    def leaves_to_ranks(self, name: str | None) -> bool:
        """Return whether only the ranks evaluate the test's marks `name`."""
        if not self.key.grouped:
            return False
        if name == "skip":
            # A skip here needs no ranks. But its condition is not known, and may depend on what only ranks have.
            conftests = (folder / "conftest.py" for folder in self.item.path.parents)
            return any(map(mentions_ranks, map(str, (self.item.path, *conftests))))
        return name == "skipif" or (name == "xfail" and not self.expects_failure)

    @property
    def world(self) -> int:
        """The number of the world in which the test runs, or has run; 0 if there is none."""
        return 0 if self._run is None else self._run.spec.world

    def verdict(self, when: str) -> Verdict | None:
        """Return the verdict on a phase, or None if the phase has not run."""
        return self._verdicts.get(when)

    def forget_run(self) -> None:
        """Release the run and its verdicts."""
        self._run = None
        self._verdicts.clear()

    # Methods that the item calls in place of its own

    def setup(self) -> None:
        __tracebackhide__ = True
        self.forget_run()
        # A plugin may have run the test before.
        self.item.user_properties[:] = [one for one in self.item.user_properties if one[0] != CAUSE]
        if self.missing is not None:
            if self._driver.settings.strict:
                message = f"{self.missing} (--accel-strict)"
                self._verdicts["setup"] = Verdict("failed", longrepr=text_longrepr(message, [message], self.place))
                raise phase_verdict.not_run(message)
            longrepr = (str(self.item.path), self.place[1], f"Skipped: {self.missing}")
            self._verdicts["setup"] = Verdict("skipped", longrepr=longrepr)
            pytest.skip(self.missing)
        self._run = WorldRun(self, self._driver, self._verdicts)
        self._phase("setup")

    def runtest(self) -> None:
        __tracebackhide__ = True
        self._phase("call")

    def teardown(self) -> None:
        __tracebackhide__ = True
        if self._run is not None and self._run.has_world:
            self._phase("teardown")

    def _phase(self, when: When) -> None:
        __tracebackhide__ = True
        assert self._run is not None
        verdict = self._verdicts[when] = self._run.phase(when)
        if (error := verdict.exception()) is not None:
            if self._run.was_refused:
                vars(error)[NOT_RUN] = True
            raise error

    # Hooks of the phases' reports

    def complete_report(self, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """Put the ranks' results into the driver's `report` of a phase, and into the `call` that it reports."""
        self._failed_in_merge = False
        verdict = self._verdicts.get(report.when) or self._judge_skip(report)
        if verdict is None:
            return
        if self.missing is not None:
            report.accel_missing = self.missing  # type: ignore[attr-defined]
        verdict.complete(report, call, self.item)
        if verdict.rank_data:
            self._merge_rank_data(report, verdict.rank_data)

    def _merge_rank_data(self, report: pytest.TestReport, sent: Mapping[int, dict[str, Any]]) -> None:
        """Have plugins merge the data that ranks have `sent` with a phase. A plugin that raises fails the test."""
        failed_before = report.failed
        try:
            self.item.ihook.pytest_accel_merge(item=self.item, report=report, rank_data=sent)
        except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
            text = f"pytest_accel_merge raised {type(error).__name__}: {error}\n{format_exc()}"
            if failed_before:
                report.sections.append(("pytest_accel_merge", text))
            else:
                report.outcome, report.longrepr = "failed", text
        self._failed_in_merge = report.failed and not failed_before

    def _judge_skip(self, report: pytest.TestReport) -> Verdict | None:
        """Name the condition in the `report` if a hook has skipped the test in this process, which is no rank.

        Return a verdict with ``--accel-strict``.
        """
        condition = None
        if report.skipped and self.key.grouped:
            condition = condition_of(report.longrepr, self.item.config.rootpath)
        if condition is None:
            return None
        report.accel_condition = condition  # type: ignore[attr-defined]
        if not self._driver.settings.strict:
            return None
        message = f"skipped by a condition on what only ranks have: {condition} (--accel-strict)"
        report.outcome = "failed"
        return Verdict("failed", longrepr=text_longrepr(message, [message], self.place))

    def conclude_report(self, report: pytest.TestReport) -> None:
        """Complete the report of a phase after pytest has applied xfail to it."""
        if self._failed_in_merge:
            phase_verdict.report_not_run(report)
        verdict = self._verdicts.get(report.when)
        # Not during the phase: pytest would capture the output of plugins as the test's.
        if verdict is not None and verdict.warnings:
            phase_verdict.replay_warnings(self.item, verdict.warnings)
        for data in () if self._run is None else self._run.take_subtests():
            subtest = self.item.config.hook.pytest_report_from_serializable(config=self.item.config, data=data)
            if subtest.failed and report.skipped and hasattr(report, "wasxfail"):
                # The test is an expected failure, so its failed subtests are too.
                subtest.outcome, subtest.wasxfail = "skipped", report.wasxfail
            self.item.ihook.pytest_runtest_logreport(report=subtest)
        if verdict is not None and verdict.longrepr is not None and report.failed and self._run is not None:
            *parents, name = self.node.names
            _, name = self.item.stash.get(VARIANT, (None, name))
            command = repro_command.command(self.item, (*parents, name), self._run.spec, self._driver.session_kind)
            repro_command.append(report, command, self.item.config.option)


class WorldRun:
    """The run of a marked test in a world. The test's `MarkedItem` makes one when pytest sets the test up."""

    def __init__(self, test: MarkedItem, driver: Driver, verdicts: Mapping[str, Verdict]) -> None:
        """Start the test in a world of the `driver`. `verdicts` has the verdict on each phase that has ended."""
        __tracebackhide__ = True
        self._test = test
        self._driver = driver
        self._verdicts = verdicts
        self._subtests: list[dict[str, Any]] = []
        """The merged reports of subtests that have not been sent to pytest, serialized as pytest does it."""
        self._reported_ends: set[int] = set()
        """The ranks whose end has been reported with a phase of the test. It is reported only once."""
        began = monotonic()
        self._world: World | None = driver.begin(test)
        test.limits.leave_out(began)
        self.spec = self._world.grant.spec
        """The world in which the test was started. It stays known when the world has been given back."""
        self.was_refused = self._world.refused
        """True if a rank could not run the test, and the other ranks have not run it either."""
        # For junit files and report hooks.
        self._add_properties([*self._world.properties, ("accel_wait", round(self._world.waited, 3))])

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
        if verdict.cause is not None:  # The reports from the present phase on have it.
            self._test.item.user_properties.append((CAUSE, str(verdict.cause)))
        return verdict

    def _judge(self, when: When) -> Verdict:
        """Wait for phase `when` in the current world, and return its verdict."""
        __tracebackhide__ = True
        world = self._world
        assert world is not None
        outcomes = self._wait(world, when)
        finished = world.finished() if when == "teardown" else {}
        is_plain = world.monitor.reusable and not world.monitor.has_extras
        if is_plain and (plain := plain_pass(outcomes, world.announced, finished)) is not None:
            return plain
        outcomes = [one for one in outcomes if one.report is not None or one.rank not in self._reported_ends]
        if all(one.ending == "passed" for one in outcomes):
            # The end of a rank in a later phase is reported with that phase alone, although it is known already.
            outcomes = [one._replace(later=None) for one in outcomes]
        if when == "call":
            outcomes = expected_ends.marked(outcomes, world.announced)
        phase = Phase(
            when=when,
            outcomes=outcomes,
            key=self._test.key,
            place=self._test.place,
            folders=folders_of(self._test.item.config),
            records=world.monitor.records,
            failed_before=any(one.outcome == "failed" for one in self._verdicts.values()),
            finished=finished,
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
        if phase_verdict.raises(verdict.leak_warnings, phase.place):
            phase = structs.replace(phase, leaks="fail")
            verdict = judge(phase)
        self._reported_ends |= reported_ends(verdict, outcomes)
        world.monitor.rule_out(verdict.kill_reason, retire=verdict.retire)
        if when == "teardown" and not world.monitor.reusable and (errors := world.tear_down()):
            self._end_session_if_requested(world)
            verdict = judge(structs.replace(phase, late_errors=errors))
        if when == "teardown" and (lost := world.not_torn_down) and (fixtures := wider_fixtures(self._test.item)):
            self._add_properties([(NOT_TORN_DOWN, f"{', '.join(fixtures)} ({ranks_text(lost)})")])
        self._add_properties(verdict.properties)
        return verdict

    def _wait(self, world: World, when: When) -> Sequence[RankOutcome]:
        """Return the ranks' outcomes of phase `when`. End the world if the wait is interrupted."""
        __tracebackhide__ = True
        item = self._test.item
        try:
            outcomes = world.wait(when, self._test.limits.of_phase())
        except KeyboardInterrupt:
            self._driver.interrupt()
            raise
        except BaseException as error:
            # After another plugin's timeout the ranks still run.
            for rank, stack in world.monitor.stacks().items():
                item.add_report_section(when, f"stacks [rank {rank}]", stack_text(stack, folders_of(item.config)))
            self._driver.end_world(f"the driver stopped waiting ({type(error).__name__})")
            raise
        # If all ranks have reported this phase, the request came in a later phase.
        if world.monitor.exit_request is not None and any(one.report is None for one in outcomes):
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
