"""Redirects a marked item's phases to its world, and gives the ranks' merged report in place of the item's own."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from functools import cached_property, partial
from traceback import format_exc
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.messages import ExceptionSketch, NodeRef, WarningSketch, When, WorldSpec
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.requirement import Requirement
from pytest_accel.core.shims import leave_fixtures_to_ranks
from pytest_accel.core.stash_keys import MARKED, RETRIED
from pytest_accel.core.world_key import WorldShape
from pytest_accel.diagnostics.rank_state import PHASES
from pytest_accel.driver import repro_command
from pytest_accel.driver.log_capture_bypass import without_ranks_hooks
from pytest_accel.driver.world import World
from pytest_accel.rank import rank_data
from pytest_accel.rank.collector import names_of
from pytest_accel.verdict import judgement, remote_exceptions
from pytest_accel.verdict.infra_failures import outside_cause
from pytest_accel.verdict.judgement import RankError, Verdict

if TYPE_CHECKING:
    from pytest_accel.settings.options import Settings

_CONDITIONS = ("skip", "skipif", "xfail", "dependency", "flaky")
"""Marks by which the driver may decide not to run a test (`dependency` is pytest-dependency's), or to run it again."""


class Runner(Protocol):
    """What begins tests in worlds, for all marked items of this process."""

    @property
    def settings(self) -> Settings:
        """The session's settings."""

    @property
    def session_kind(self) -> str | None:
        """The kind of the session's devices; None where it has none."""

    def begin(self, marked: MarkedItem) -> World:
        """Begin the test of `marked`, and return its world."""

    def look_at_interrupted(self, marked: MarkedItem) -> None:
        """Note where the ranks of `marked` are."""

    def end_world(self, reason: str) -> None:
        """End the world of the running test."""


def marked_of(item: pytest.Item | pytest.Collector) -> MarkedItem | None:
    """Return what the plugin knows of `item`; None if it has no marks."""
    marked: MarkedItem | None = item.stash.get(MARKED, None)
    return marked


class MarkedItem:
    """What the plugin knows of an item with marks, and the phases that stand in for the item's own."""

    def __init__(
        self, item: pytest.Item, requirement: Requirement, shape: WorldShape, missing: str | None, driver: Runner
    ) -> None:
        """`missing` says why the test cannot run on this machine; None: it can."""
        self.item = item
        self.requirement = requirement
        self.shape = shape
        self.missing = missing
        self.following: MarkedItem | None = None
        """The next test of the same shape, as far as the order is known."""
        self.last = False
        self.verdicts: dict[str, Verdict] = {}
        self._subtests: list[pytest.TestReport] = []
        self._warnings: list[WarningSketch] = []
        """Of all ranks, to be replayed with the next report."""
        self._driver = driver
        self._world: World | None = None
        self._spec: WorldSpec | None = None
        """The world that the test has begun in."""
        self._durations: dict[str, float] = {}
        self._rank_data: dict[str, dict[int, dict[str, Any]]] = {}
        """What plugins have sent from ranks: by phase, then by rank."""
        self._failed_in_merge = False
        """Whether a plugin that took in such data has failed the phase's report."""
        self._reported_ends: set[int] = set()
        """Ranks whose end is part of the report of a phase."""
        self._limit: tuple[float, float] | None = None
        self._retried = False

    def limit(self, seconds: float | None) -> None:
        """From now on, all phases together have so many `seconds`; None: each has its own time."""
        self._limit = None if seconds is None else (seconds, monotonic() + seconds)

    def install(self) -> None:
        """Put this object's phases in the place of the item's, whatever its class."""
        # That of the class: the attributes of a copied item are those of the original, which may be redirected.
        self._own_repr_failure = partial(type(self.item).repr_failure, self.item)
        if type(self.item).repr_failure is not pytest.Function.repr_failure:
            # It may read attributes of its own exception, which the stand-in for a rank's does not have.
            self._own_repr_failure = partial(pytest.Item.repr_failure, self.item)
        for name in ("setup", "runtest", "teardown", "repr_failure"):
            setattr(self.item, name, getattr(self, name))
        leave_fixtures_to_ranks(self.item)
        self.item.__class__ = without_ranks_hooks(type(self.item))

    @property
    def has_begun(self) -> bool:
        """Whether it is, or was, run in a world."""
        return self._spec is not None

    @property
    def node(self) -> NodeRef:
        return NodeRef(str(self.item.path), names_of(self.item))

    @property
    def is_sure_to_run(self) -> bool:
        """Whether nothing that is known now keeps its phases from being asked for."""
        session = self.item.session
        return self.missing is None and not session.shouldstop and not session.shouldfail and self._is_unconditional

    @cached_property
    def _is_unconditional(self) -> bool:
        """Whether no mark makes it depend on a condition: looked at when the tests run, when all marks are there.

        The option ``--force-flaky`` stands for a mark `flaky` on each test.
        """
        if getattr(self.item.config.option, "force_flaky", False):
            return False
        return not any(mark.name in _CONDITIONS for mark in self.item.iter_markers())

    @property
    def place(self) -> tuple[str, int]:
        """File and line of the test."""
        path, line, _ = self.item.location
        return path, (line or 0) + 1

    # In place of the item's own

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
            where = (str(self.item.path), self.place[1], f"Skipped: {self.missing}")
            self.verdicts["setup"] = Verdict("skipped", longrepr=where)
            pytest.skip(self.missing)
        if self._only_shows():
            return
        self._enter()
        self._phase("setup")

    def runtest(self) -> None:
        __tracebackhide__ = True
        if not self._only_shows():
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
        """Return the ranks' account of a failed call phase, for plugins that make a report of it by themselves."""
        judged = self.verdicts.get("call")
        if judged is not None and judged.outcome == "failed" and isinstance(judged.longrepr, dict):
            return self._rebuild(judged.longrepr)
        return self._own_repr_failure(excinfo, *args, **kwargs)

    def _only_shows(self) -> bool:
        """--setup-only and --setup-plan run no test, and the driver has no fixtures to show."""
        option = self.item.config.option
        return bool(getattr(option, "setuponly", False) or getattr(option, "setupplan", False))

    def _phase(self, when: When) -> None:
        __tracebackhide__ = True
        judged, cause = self._run(when)
        if cause is not None and self._driver.settings.retry_dead and not self._retried:
            self._retried = True
            self._property(RETRIED, f"{judged.message} ({cause})")
            judged = self._run_again(when)
        self.verdicts[when] = judged
        _raise(judged)

    def _run_again(self, when: When) -> Verdict:
        """The test from its beginning to phase `when`, in a world of its own."""
        __tracebackhide__ = True
        self._reported_ends.clear()
        self._enter()
        for phase in PHASES:
            judged, _ = self._run(phase)
            if phase == when or judged.outcome != "passed":
                break
        return judged

    def _enter(self) -> None:
        """Have the test begun."""
        __tracebackhide__ = True
        self._world = self._driver.begin(self)
        self._spec = self._world.grant.spec
        self._describe()

    def _run(self, when: When) -> tuple[Verdict, str | None]:
        """What becomes of phase `when`, and why it is none of the test's doing where it has failed."""
        __tracebackhide__ = True
        world = self._world
        assert world is not None
        timeout = left = self.requirement.timeout or self._driver.settings.timeout
        if self._limit is not None and self._limit[1] - monotonic() < timeout:
            timeout, left = self._limit[0], max(0.0, self._limit[1] - monotonic())
        try:
            outcomes = world.wait(when, timeout, left)
        except BaseException as error:
            # Ctrl-C, or another plugin's timer: whatever it is, the ranks are still at work.
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
            # The end of a rank is reported once, with the phase that failed first.
            outcomes = tuple(
                outcome for outcome in outcomes if outcome.report is not None or outcome.rank not in self._reported_ends
            )
        here = str(self.item.config.invocation_params.dir)
        judged = judgement.judge(
            when,
            outcomes,
            place=self.place,
            about=self.shape.about,
            here=here,
            findings=world.findings,
        )
        if judged.outcome == "failed":
            self._reported_ends |= {outcome.rank for outcome in outcomes if outcome.report is None or outcome.later}
        if when != "teardown" and len({outcome.ending for outcome in outcomes}) > 1:
            world.worn = True  # A rank may have begun a message that the one it is for has not come to.
        if when == "teardown":
            judged = self._settle(world, judged, failed_before)
        durations = [outcome.report.report.get("duration", 0.0) for outcome in outcomes if outcome.report]
        self._durations[when] = max(durations, default=0.0)
        self._rank_data[when] = {
            outcome.rank: sent
            for outcome in outcomes
            if outcome.report is not None and (sent := outcome.report.report.get(rank_data.KEY))
        }
        for name, value in judgement.properties(outcomes):
            self._property(name, value)
        # A fixture may have some as well: they are told of with the phase that is the last one to come, or to be asked.
        failed_subtests = self._take_subtests(world) if when != "setup" or judged.outcome != "passed" else 0
        if failed_subtests and when == "call" and judged.outcome == "passed":
            message = f"contains {failed_subtests} failed subtest{'s' if failed_subtests > 1 else ''}"
            longrepr = judgement.failure(message, [message], self.place)
            judged = Verdict("failed", message, RankError, longrepr, judged.sections)
        return judged, outside_cause(outcomes)

    def _end_world(self, reason: str) -> None:
        """No phase that is still to come has a world to wait for."""
        self._world = None
        self._driver.end_world(reason)

    def _settle(self, world: World, judged: Verdict, failed_before: bool) -> Verdict:
        """The last phase: what the test left behind in its ranks counts as well."""
        finished = world.finished()
        for rank, left in sorted(finished.items()):
            for name, value in left.properties.items():
                self._property(f"{name}[rank {rank}]" if world.size > 1 else name, value)
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

    def _describe(self) -> None:
        """What junit and report hooks get to know of the world."""
        assert self._world is not None
        spec = self._world.grant.spec
        if spec.grouped:
            self._property("accel_ranks", spec.ranks)
        if spec.devices:
            self._property("accel_devices", ",".join(device.id for device in spec.devices))

    def _property(self, name: str, value: object) -> None:
        if (name, value) not in self.item.user_properties:
            self.item.user_properties.append((name, value))

    def _take_subtests(self, world: World) -> int:
        """Keep the ranks' subtest reports, one for all ranks that say the same; gives how many failed."""
        hook = self.item.config.hook
        failed = 0
        seen: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
        times: Counter[tuple[int, str]] = Counter()
        for rank, extra in world.extras:
            context = repr(extra.report.get("_subtest.context"))
            times[rank, context] += 1  # One rank may have several of one context.
            seen.setdefault((context, times[rank, context]), []).append((rank, extra.report))
        world.extras.clear()
        for reports in seen.values():
            wrong = [entry for entry in reports if entry[1]["outcome"] == "failed"]
            failed += bool(wrong)
            rank, data = (wrong or reports)[0]
            report = hook.pytest_report_from_serializable(config=self.item.config, data=dict(data))
            if wrong and world.size > 1:
                report.sections.append(("ranks", f"{ranks_text([rank for rank, _ in wrong])} failed"))
            self._subtests.append(report)
        return failed

    def graft(self, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """Make the driver's `report` of a phase, and the `call` that it is about, say what the ranks have said."""
        self._failed_in_merge = False
        judged = self.verdicts.get(report.when)
        if judged is None:
            return
        if self.missing is not None:
            report.accel_missing = self.missing  # type: ignore[attr-defined]
        if duration := self._durations.get(report.when):
            # The ranks' own: the driver hears of all phases when the test has ended.
            report.duration, report.stop = duration, report.start + duration
            call.duration, call.stop = duration, call.start + duration
        report.sections.extend(judged.sections)
        if judged.wasxfail is not None and not report.failed:
            report.wasxfail = judged.wasxfail
        if judged.longrepr is not None and not report.passed:
            self._take_over(report, judged)
        if sent := self._rank_data.get(report.when):
            self._merge(report, sent)

    def _merge(self, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        """Have plugins take in what ranks have `sent` with a phase; one that raises fails the test."""
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
        """Complete the report of a phase, which has raised `error`, when pytest has applied xfail to it."""
        failed_outside = (
            not remote_exceptions.has_run(error) or isinstance(error, rank_data.RankDataError) or self._failed_in_merge
        )
        if failed_outside and hasattr(report, "wasxfail"):
            del report.wasxfail  # The mark expects a failure of the test, not of what runs it or merges its data.
            report.outcome = "failed"
        # Not while the phase runs, when what plugins write is captured as the test's.
        warnings, self._warnings = self._warnings, []
        remote_exceptions.replay_warnings(self.item, warnings)
        subtests, self._subtests = self._subtests, []
        for subtest in subtests:
            if subtest.failed and report.skipped and hasattr(report, "wasxfail"):
                # The driver has judged: an expected failure, so theirs are too.
                subtest.outcome, subtest.wasxfail = "skipped", report.wasxfail
            self.item.ihook.pytest_runtest_logreport(report=subtest)
        judged = self.verdicts.get(report.when)
        if judged is not None and judged.longrepr is not None and report.failed and self._spec is not None:
            command = repro_command.command(self.item, self.node, self._spec, self._driver.session_kind)
            repro_command.append(report, command, self.item.config.option)

    def _take_over(self, report: pytest.TestReport, judged: Verdict) -> None:
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
            "longrepr": deepcopy(longrepr),  # pytest changes it.
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
