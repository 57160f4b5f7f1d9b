"""Redirects the phases of a marked item to its world, and puts the ranks' merged report in place of the item's own."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from functools import cached_property, partial
from traceback import format_exc
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.rank_messages import ExceptionSketch, NodeRef, WarningSketch, When
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.shims import leave_fixtures_to_ranks
from pytest_accel.core.stash_keys import MARKED, RETRIED
from pytest_accel.core.world_key import WorldKey
from pytest_accel.core.world_spec import WorldSpec
from pytest_accel.diagnostics.rank_state import PHASES
from pytest_accel.driver import repro_command
from pytest_accel.driver.item_plan import ItemPlan
from pytest_accel.driver.log_capture_bypass import without_rank_hooks
from pytest_accel.driver.world import World
from pytest_accel.rank import rank_data
from pytest_accel.rank.collector import names_of
from pytest_accel.verdict import judgement, remote_exceptions
from pytest_accel.verdict.infra_failures import outside_cause
from pytest_accel.verdict.judgement import RankError, Verdict

if TYPE_CHECKING:
    from pytest_accel.settings.options import Settings

_CONDITIONS = ("skip", "skipif", "xfail", "dependency", "flaky")
"""Marks that may keep a test from running (`dependency` is pytest-dependency's), or have it run again."""


class Runner(Protocol):
    """Starts the tests of all marked items of this process in worlds; implemented by `Driver`."""

    @property
    def settings(self) -> Settings:
        """The session's settings."""

    @property
    def session_kind(self) -> str | None:
        """The kind of the session's devices; None if it has none."""

    def begin(self, marked: MarkedItem) -> World:
        """Start the test of `marked`, and return its world."""

    def look_at_interrupted(self, marked: MarkedItem) -> None:
        """Record the stacks of the ranks of `marked`."""

    def end_world(self, reason: str) -> None:
        """Have the world of the running test terminated."""


def marked_of(item: pytest.Item | pytest.Collector) -> MarkedItem | None:
    """Return the `MarkedItem` of `item`; None if it has no marks of the plugin."""
    marked: MarkedItem | None = item.stash.get(MARKED, None)
    return marked


class MarkedItem:
    """State of an item with marks, and the phases that replace the item's own. Stored in the item's stash."""

    def __init__(self, item: pytest.Item, plan: ItemPlan, driver: Runner) -> None:
        self.item = item
        self.plan = plan
        self.following: MarkedItem | None = None
        """The next test that uses a world of the same key, as far as the order is known."""
        self.last = False
        """True if, as far as known, no other test follows in the world."""
        self.verdicts: dict[str, Verdict] = {}
        self._subtests: list[pytest.TestReport] = []
        self._warnings: list[WarningSketch] = []
        """Warnings of all ranks, to be replayed with the next report."""
        self._driver = driver
        self._world: World | None = None
        self._spec: WorldSpec | None = None
        """The world in which the test was started. Unlike `_world` it stays known after the test."""
        self._durations: dict[str, float] = {}
        self._rank_data: dict[str, dict[int, dict[str, Any]]] = {}
        """Data that plugins have sent from ranks: by phase, then by rank."""
        self._failed_in_merge = False
        """True if a plugin that merged such data has failed the phase's report."""
        self._reported_ends: set[int] = set()
        """Ranks whose end has been reported with a phase."""
        self._time_limit: tuple[float, float] | None = None
        """Seconds for all phases together, and their deadline (`clock.monotonic`)."""
        self._retried = False

    def limit(self, seconds: float | None) -> None:
        """Limit all phases together to `seconds` from now on; None: each phase has its own timeout."""
        self._time_limit = None if seconds is None else (seconds, monotonic() + seconds)

    def install(self) -> None:
        """Replace the methods of the item that run its phases by those of this object."""
        # Use the method of the class: a copied item has the original's attributes, which may be replaced already.
        self._own_repr_failure = partial(type(self.item).repr_failure, self.item)
        if type(self.item).repr_failure is not pytest.Function.repr_failure:
            # A custom method may need attributes of its own exception type, which the stand-in for a rank's lacks.
            self._own_repr_failure = partial(pytest.Item.repr_failure, self.item)
        for name in ("setup", "runtest", "teardown", "repr_failure"):
            setattr(self.item, name, getattr(self, name))
        leave_fixtures_to_ranks(self.item)
        self.item.__class__ = without_rank_hooks(type(self.item))

    @property
    def key(self) -> WorldKey:
        """Key of the world in which the test runs."""
        return self.plan.key

    @property
    def missing(self) -> str | None:
        """Reason why the test cannot run on this machine; None if it can."""
        return self.plan.missing

    @property
    def has_begun(self) -> bool:
        """True if the test runs, or has run, in a world."""
        return self._spec is not None

    @property
    def node(self) -> NodeRef:
        return NodeRef(str(self.item.path), names_of(self.item))

    @property
    def is_sure_to_run(self) -> bool:
        """True if, as far as known, pytest will ask for all phases of the test."""
        session = self.item.session
        return self.missing is None and not session.shouldstop and not session.shouldfail and self._is_unconditional

    @cached_property
    def _is_unconditional(self) -> bool:
        """True if no mark makes the run of the test conditional. Evaluated when tests run: all marks are known then.

        The option ``--force-flaky`` counts as a mark `flaky` on each test.
        """
        if getattr(self.item.config.option, "force_flaky", False):
            return False
        return not any(mark.name in _CONDITIONS for mark in self.item.iter_markers())

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the test."""
        path, line, _ = self.item.location
        return path, (line or 0) + 1

    # Methods that replace the item's own

    def setup(self) -> None:
        __tracebackhide__ = True
        self.verdicts.clear()
        self._durations.clear()
        self._rank_data.clear()
        self._reported_ends.clear()
        self._world = self._spec = None
        self._retried = False
        if self.missing is not None:
            if self._driver.settings.strict:
                self.verdicts["setup"] = Verdict("failed")
                raise remote_exceptions.not_run(f"{self.missing} (--accel-strict)")
            longrepr = (str(self.item.path), self.place[1], f"Skipped: {self.missing}")
            self.verdicts["setup"] = Verdict("skipped", longrepr=longrepr)
            pytest.skip(self.missing)
        if self._is_display_only():
            return
        self._start()
        self._phase("setup")

    def runtest(self) -> None:
        __tracebackhide__ = True
        if not self._is_display_only():
            self._phase("call")

    def teardown(self) -> None:
        __tracebackhide__ = True
        if self._world is None:
            return
        try:
            self._phase("teardown")
        finally:
            self._world = None

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        """Return the ranks' report of a failed call phase, for plugins that build their own report of it."""
        judged = self.verdicts.get("call")
        if judged is not None and judged.outcome == "failed" and isinstance(judged.longrepr, dict):
            return self._rebuild(judged.longrepr)
        return self._own_repr_failure(excinfo, *args, **kwargs)

    def _is_display_only(self) -> bool:
        """Return True with --setup-only and --setup-plan: no test runs, and the driver has no fixtures to show."""
        option = self.item.config.option
        return bool(getattr(option, "setuponly", False) or getattr(option, "setupplan", False))

    def _phase(self, when: When) -> None:
        __tracebackhide__ = True
        judged, cause = self._judge(when)
        if cause is not None and self._driver.settings.retry_dead and not self._retried:
            self._retried = True
            self._add_property(RETRIED, f"{judged.message} ({cause})")
            judged = self._retry(when)
        self.verdicts[when] = judged
        _raise(judged)

    def _retry(self, when: When) -> Verdict:
        """Run the test again up to phase `when`, in another world; return the verdict."""
        __tracebackhide__ = True
        self._reported_ends.clear()
        self._start()
        for phase in PHASES:
            judged, _ = self._judge(phase)
            if phase == when or judged.outcome != "passed":
                break
        return judged

    def _start(self) -> None:
        """Start the test in its world."""
        __tracebackhide__ = True
        self._world = self._driver.begin(self)
        self._spec = self._world.grant.spec
        self._add_world_properties()

    def _judge(self, when: When) -> tuple[Verdict, str | None]:
        """Wait for phase `when`; return its verdict, and the cause of a failure if that lies outside of the test."""
        __tracebackhide__ = True
        world = self._world
        assert world is not None
        timeout = left = self.plan.timeout or self._driver.settings.timeout
        if self._time_limit is not None and self._time_limit[1] - monotonic() < timeout:
            timeout, left = self._time_limit[0], max(0.0, self._time_limit[1] - monotonic())
        try:
            outcomes = world.wait(when, timeout, left)
        except BaseException as error:
            # After Ctrl-C or another plugin's timeout the ranks still run.
            if isinstance(error, KeyboardInterrupt):
                self._driver.look_at_interrupted(self)
            else:
                for rank, stack in world.stacks().items():
                    self.item.add_report_section(when, f"stacks [rank {rank}]", stack)
            self._end_world(f"the driver stopped waiting ({type(error).__name__})")
            raise
        if world.exit_request is not None:
            request = world.exit_request
            self._end_world("pytest.exit was called in it")
            pytest.exit(request.reason, returncode=request.returncode)
        failed_before = any(earlier.outcome == "failed" for earlier in self.verdicts.values())
        if when == "teardown" and failed_before:
            # Report the end of a rank only once: with the phase that failed first.
            outcomes = tuple(
                outcome for outcome in outcomes if outcome.report is not None or outcome.rank not in self._reported_ends
            )
        folder = str(self.item.config.invocation_params.dir)
        judged = judgement.judge(
            when,
            outcomes,
            place=self.place,
            about=self.key.about,
            here=folder,
            findings=world.findings,
        )
        if judged.outcome == "failed":
            self._reported_ends |= {outcome.rank for outcome in outcomes if outcome.report is None or outcome.later}
        if when != "teardown" and len({outcome.ending for outcome in outcomes}) > 1:
            world.worn = True  # A rank may have sent a message that its receiver has not read.
        if when == "teardown":
            judged = self._finish(world, judged, failed_before)
        durations = [outcome.report.report.get("duration", 0.0) for outcome in outcomes if outcome.report]
        self._durations[when] = max(durations, default=0.0)
        self._rank_data[when] = {
            outcome.rank: sent
            for outcome in outcomes
            if outcome.report is not None and (sent := outcome.report.report.get(rank_data.KEY))
        }
        for name, value in judgement.properties(outcomes):
            self._add_property(name, value)
        # Subtests of a setup that passed are reported with the call phase, which follows.
        failed_subtests = self._take_subtests(world) if when != "setup" or judged.outcome != "passed" else 0
        if failed_subtests and when == "call" and judged.outcome == "passed":
            message = f"contains {failed_subtests} failed subtest{'s' if failed_subtests > 1 else ''}"
            longrepr = judgement.failure(message, [message], self.place)
            judged = Verdict("failed", message, RankError, longrepr, judged.sections)
        return judged, outside_cause(outcomes)

    def _end_world(self, reason: str) -> None:
        """Have the world terminated; later phases of the test do not wait for it."""
        self._world = None
        self._driver.end_world(reason)

    def _finish(self, world: World, judged: Verdict, failed_before: bool) -> Verdict:
        """Return the verdict on the last phase, in which leaks and mismatches between ranks count as well."""
        finished = world.finished()
        for rank, left in sorted(finished.items()):
            for name, value in left.properties.items():
                self._add_property(f"{name}[rank {rank}]" if world.size > 1 else name, value)
        self._warnings += [warning for left in finished.values() for warning in left.warnings]
        problems = [left.stale for left in finished.values() if left.stale]
        mismatch = judgement.compare_collectives(finished)
        if mismatch is not None:
            world.harm = world.harm or mismatch
            problems.insert(0, mismatch)
        if len({left.groups for left in finished.values()}) > 1:
            world.harm = world.harm or "its ranks made different numbers of process groups"
        leftovers = judgement.leftovers(finished)
        if self._driver.settings.leaks == "warn":
            leftovers = remote_exceptions.warn(leftovers, self.place)
        elif self._driver.settings.leaks == "off":
            leftovers = []
        if not (problems or leftovers) or judged.outcome != "passed" or failed_before:
            return judged
        kind = judgement.RanksDisagree if problems else judgement.LeftBehind
        problems += leftovers
        message = problems[0].splitlines()[0]
        longrepr = judgement.failure(message, "\n".join(problems).splitlines(), self.place)
        return Verdict("failed", message, kind, longrepr, judged.sections)

    def _add_world_properties(self) -> None:
        """Add the world's ranks and devices to the user properties, for junit files and report hooks."""
        assert self._world is not None
        spec = self._world.grant.spec
        if spec.grouped:
            self._add_property("accel_ranks", spec.ranks)
        if spec.devices:
            self._add_property("accel_devices", ",".join(device.id for device in spec.devices))

    def _add_property(self, name: str, value: object) -> None:
        if (name, value) not in self.item.user_properties:
            self.item.user_properties.append((name, value))

    def _take_subtests(self, world: World) -> int:
        """Keep one subtest report for each subtest, merged over ranks; return how many subtests failed."""
        hook = self.item.config.hook
        failed = 0
        seen: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
        times: Counter[tuple[int, str]] = Counter()
        for rank, extra in world.extras:
            context = repr(extra.report.get("_subtest.context"))
            times[rank, context] += 1  # A rank may have several subtests with the same context.
            seen.setdefault((context, times[rank, context]), []).append((rank, extra.report))
        world.extras.clear()
        for reports in seen.values():
            failures = [entry for entry in reports if entry[1]["outcome"] == "failed"]
            failed += bool(failures)
            rank, data = (failures or reports)[0]
            report = hook.pytest_report_from_serializable(config=self.item.config, data=dict(data))
            if failures and world.size > 1:
                report.sections.append(("ranks", f"{ranks_text([rank for rank, _ in failures])} failed"))
            self._subtests.append(report)
        return failed

    def graft(self, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """Put the ranks' results into the driver's `report` of a phase, and into the `call` that it reports."""
        self._failed_in_merge = False
        judged = self.verdicts.get(report.when)
        if judged is None:
            return
        if self.missing is not None:
            report.accel_missing = self.missing  # type: ignore[attr-defined]
        if duration := self._durations.get(report.when):
            # Use the ranks' duration: the driver receives the reports of all phases when the test has ended.
            report.duration, report.stop = duration, report.start + duration
            call.duration, call.stop = duration, call.start + duration
        report.sections.extend(judged.sections)
        if judged.wasxfail is not None and not report.failed:
            report.wasxfail = judged.wasxfail
        if judged.longrepr is not None and not report.passed:
            self._replace_longrepr(report, judged)
        if sent := self._rank_data.get(report.when):
            self._merge(report, sent)

    def _merge(self, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        """Have plugins merge the data that ranks have `sent` with a phase. A plugin that raises fails the test."""
        failed_before = report.failed
        try:
            self.item.ihook.pytest_accel_merge(item=self.item, report=report, rank_data=sent)
        except rank_data.FAILURES as error:
            text = f"pytest_accel_merge raised {type(error).__name__}: {error}\n{format_exc()}"
            if failed_before:
                report.sections.append(("pytest_accel_merge", text))
            else:
                report.outcome, report.longrepr = "failed", text
        self._failed_in_merge = report.failed and not failed_before

    def conclude(self, report: pytest.TestReport, error: BaseException | None) -> None:
        """Complete the report of a phase after pytest has applied xfail to it. `error` is the phase's exception."""
        failed_outside = (
            not remote_exceptions.has_run(error) or isinstance(error, rank_data.RankDataError) or self._failed_in_merge
        )
        if failed_outside and hasattr(report, "wasxfail"):
            del report.wasxfail  # xfail covers failures of the test, not failures to run it or to merge its data.
            report.outcome = "failed"
        # Not during the phase: pytest would capture the output of plugins as the test's.
        warnings, self._warnings = self._warnings, []
        remote_exceptions.replay_warnings(self.item, warnings)
        subtests, self._subtests = self._subtests, []
        for subtest in subtests:
            if subtest.failed and report.skipped and hasattr(report, "wasxfail"):
                # The test is an expected failure, so its failed subtests are too.
                subtest.outcome, subtest.wasxfail = "skipped", report.wasxfail
            self.item.ihook.pytest_runtest_logreport(report=subtest)
        judged = self.verdicts.get(report.when)
        if judged is not None and judged.longrepr is not None and report.failed and self._spec is not None:
            command = repro_command.command(self.item, self.node, self._spec, self._driver.session_kind)
            repro_command.append(report, command, self.item.config.option)

    def _replace_longrepr(self, report: pytest.TestReport, judged: Verdict) -> None:
        if judged.outcome == "skipped" and isinstance(judged.longrepr, (tuple, list)):
            report.longrepr = tuple(judged.longrepr)
        elif report.when != "call" and isinstance(judged.longrepr, dict) and not isinstance(report.longrepr, str):
            report.longrepr = self._rebuild(judged.longrepr)

    def _rebuild(self, longrepr: dict[str, Any]) -> Any:
        data = {
            "$report_type": "TestReport",
            "nodeid": self.item.nodeid,
            "location": self.item.location,
            "keywords": {},
            "outcome": "failed",
            "longrepr": deepcopy(longrepr),  # pytest modifies it.
            "when": "call",
        }
        config = self.item.config
        return config.hook.pytest_report_from_serializable(config=config, data=data).longrepr


def _raise(judged: Verdict) -> None:
    __tracebackhide__ = True
    if judged.outcome == "passed":
        return
    if judged.outcome == "skipped":
        pytest.skip(judged.message)
    if judged.outcome == "xfailed":
        pytest.xfail(judged.message.removeprefix("reason: "))
    if isinstance(judged.error, ExceptionSketch):
        raise remote_exceptions.stand_in(judged.error)
    raise (judged.error or RankError)(judged.message)
