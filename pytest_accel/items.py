"""Redirects a marked item's phases to its world, and gives the ranks' merged report in place of the item's own."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import verdict
from pytest_accel.leases.locks import Holder
from pytest_accel.markers import Requirement
from pytest_accel.verdict import RankError, Verdict
from pytest_accel.worlds.messages import ExceptionSketch, NodeRef, WarningSketch, When
from pytest_accel.worlds.roster import PoolError
from pytest_accel.worlds.shape import WorldShape
from pytest_accel.worlds.world import World

if TYPE_CHECKING:
    from pytest_accel.config import Settings
    from pytest_accel.worlds.port import Port


HOOKS: pytest.StashKey[_HooksWithoutLogging] = pytest.StashKey()


class MarkedItem:
    """What the plugin knows of an item with marks, and the phases that stand in for the item's own."""

    def __init__(
        self, item: pytest.Item, requirement: Requirement, shape: WorldShape, missing: str | None, driver: Driver
    ) -> None:
        """`missing` says why the test cannot run on this machine; None: it can."""
        self.item = item
        self.requirement = requirement
        self.shape = shape
        self.missing = missing
        self.following: MarkedItem | None = None
        """The next test of the same shape, as far as the order is known."""
        self.last = False
        self.upcoming: MarkedItem | None = None
        """The very next test, if its world may begin it while this one is still being reported."""
        self.verdicts: dict[str, Verdict] = {}
        self._subtests: list[pytest.TestReport] = []
        self._driver = driver
        self._world: World | None = None
        self._durations: dict[str, float] = {}

    def install(self) -> None:
        """Put this object's phases in the place of the item's, whatever its class."""
        for name in ("setup", "runtest", "teardown"):
            setattr(self.item, name, getattr(self, name))
        self.item.__class__ = _without_log_capture(type(self.item))

    @property
    def node(self) -> NodeRef:
        return NodeRef(str(self.item.path), tuple(self.item.nodeid.split("::")[1:]))

    @property
    def is_unconditional(self) -> bool:
        """Whether nothing on the test itself may keep its phases from being run."""
        marks = {mark.name for mark in self.item.iter_markers()}
        return self.missing is None and marks.isdisjoint(("skip", "skipif", "xfail"))

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
        self._world = None
        if self.missing is not None:
            if self._driver.settings.strict:
                pytest.fail(f"{self.missing} (--accel-strict)", pytrace=False)
            pytest.skip(self.missing)
        if self._only_shows():
            return
        self._world = self._driver.begin(self)
        self._describe()
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
        if all(judged.outcome == "passed" for judged in self.verdicts.values()):
            self._driver.begin_ahead(self.upcoming)

    def _only_shows(self) -> bool:
        """--setup-only and --setup-plan run no test, and the driver has no fixtures to show."""
        option = self.item.config.option
        return bool(getattr(option, "setuponly", False) or getattr(option, "setupplan", False))

    def _phase(self, when: When) -> None:
        __tracebackhide__ = True
        world = self._world
        assert world is not None
        timeout = self.requirement.timeout or self._driver.settings.timeout
        try:
            outcomes = world.wait(when, timeout)
        except (
            BaseException
        ) as error:  # Ctrl-C, or another plugin's timer: whatever it is, the ranks are still at work.
            stacks = world.stacks() if not isinstance(error, KeyboardInterrupt) else {}
            for rank, stack in stacks.items():
                self.item.add_report_section(when, f"stacks [rank {rank}]", stack)
            self._driver.end_world(f"the driver stopped waiting ({type(error).__name__})")
            raise
        if world.exit_request is not None:
            request = world.exit_request
            self._driver.end_world("pytest.exit was called in it")
            pytest.exit(request.reason, returncode=request.returncode)
        failed_before = any(earlier.outcome == "failed" for earlier in self.verdicts.values())
        if when == "teardown" and failed_before:
            # Ranks that were ended with the world have had their say in the phase that failed.
            outcomes = tuple(outcome for outcome in outcomes if outcome.report is not None)
        judged = verdict.judge(when, outcomes, place=self.place, about=self.shape.about, timeout=timeout)
        if when == "teardown":
            judged = self._settle(world, judged, failed_before)
        durations = [outcome.report.report.get("duration", 0.0) for outcome in outcomes if outcome.report]
        self._durations[when] = max(durations, default=0.0)
        for name, value in verdict.properties(outcomes):
            self._property(name, value)
        failed_subtests = self._take_subtests(world) if when == "call" else 0
        if failed_subtests and judged.outcome == "passed":
            message = f"contains {failed_subtests} failed subtest{'s' if failed_subtests > 1 else ''}"
            longrepr = verdict.failure(message, [message], self.place)
            judged = Verdict("failed", message, RankError, longrepr, judged.sections)
        self.verdicts[when] = judged
        _raise(judged)

    def _settle(self, world: World, judged: Verdict, failed_before: bool) -> Verdict:
        """The last phase: what the test left behind in its ranks counts as well."""
        finished = world.finished()
        for rank, left in sorted(finished.items()):
            for name, value in left.properties.items():
                self._property(f"{name}[rank {rank}]" if world.size > 1 else name, value)
        _replay_warnings(self.item, [warning for left in finished.values() for warning in left.warnings])
        if judged.outcome != "passed" or failed_before:
            return judged
        problems = [left.stale for left in finished.values() if left.stale]
        mismatch = verdict.compare_collectives(finished)
        if mismatch is not None:
            world.harm = world.harm or mismatch
            problems.insert(0, mismatch)
        if not problems:
            return judged
        message = problems[0].splitlines()[0]
        longrepr = verdict.failure(message, "\n".join(problems).splitlines(), self.place)
        return Verdict("failed", message, verdict.RanksDisagree, longrepr, judged.sections)

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
        seen: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for rank, extra in world.extras:
            seen.setdefault(repr(extra.report.get("_subtest.context")), []).append((rank, extra.report))
        world.extras.clear()
        for reports in seen.values():
            wrong = [entry for entry in reports if entry[1]["outcome"] == "failed"]
            failed += bool(wrong)
            rank, data = (wrong or reports)[0]
            report = hook.pytest_report_from_serializable(config=self.item.config, data=dict(data))
            if wrong and world.size > 1:
                report.sections.append(("ranks", f"{verdict.ranks_text([rank for rank, _ in wrong])} failed"))
            self._subtests.append(report)
        return failed

    def graft(self, report: pytest.TestReport) -> None:
        """Make the driver's report of a phase say what the ranks have said."""
        if self.missing is not None and report.when == "setup":
            report.accel_missing = self.missing  # type: ignore[attr-defined]
            return
        judged = self.verdicts.get(report.when)
        if judged is None:
            return
        subtests, self._subtests = self._subtests, []
        for subtest in subtests:  # Not while the phase runs, when the terminal's output is captured too.
            self.item.ihook.pytest_runtest_logreport(report=subtest)
        if duration := self._durations.get(report.when):
            # The ranks' own: the driver hears of all phases when the test has ended.
            report.duration, report.stop = duration, report.start + duration
        report.sections.extend(judged.sections)
        if judged.wasxfail is not None and not report.failed:
            report.wasxfail = judged.wasxfail
        if judged.longrepr is None or report.passed:
            return
        if judged.outcome == "skipped" and isinstance(judged.longrepr, (tuple, list)):
            report.longrepr = tuple(judged.longrepr)
        elif isinstance(judged.longrepr, dict) and not isinstance(report.longrepr, str):
            report.longrepr = self._rebuild(judged.longrepr)

    def _rebuild(self, longrepr: dict[str, Any]) -> Any:
        data = {
            "$report_type": "TestReport",
            "nodeid": self.item.nodeid,
            "location": self.item.location,
            "keywords": {},
            "outcome": "failed",
            "longrepr": longrepr,
            "when": "call",
        }
        config = self.item.config
        return config.hook.pytest_report_from_serializable(config=config, data=data).longrepr


class Driver:
    """Runs the marked items of one pytest process, one at a time, and keeps its world from test to test."""

    def __init__(self, config: pytest.Config, settings: Settings, port: Port) -> None:
        self.config = config
        self.settings = settings
        self._port = port
        config.stash[HOOKS] = _HooksWithoutLogging(config)
        self._world: World | None = None
        self._shape: WorldShape | None = None
        self._error: BaseException | None = None
        self._ahead: MarkedItem | None = None
        """A test that the world has been sent and whose setup phase has not been asked for."""

    def prepare(self, marked: MarkedItem) -> None:
        """Wait for the test's world before its phases begin, so that no other plugin's clock counts the waiting."""
        if marked.missing is None:
            try:
                self._have(marked)
            except (Exception, pytest.fail.Exception) as error:
                self._error = error  # To be raised in the setup phase, where it is this test's error.

    def begin(self, marked: MarkedItem) -> World:
        """Have the test begun; gives its world: a new one where the last has been harmed, as in a rerun."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        world = self._have(marked)
        if self._ahead is None:
            self._send(world, marked)
        self._ahead = None
        return world

    def begin_ahead(self, marked: MarkedItem | None) -> None:
        """Have the very next test begun, while pytest still reports the one before: half the time of a small test.

        Only for a test that is sure to be asked for: the one before has passed, and nothing waits for the world.
        """
        world, session = self._world, None if marked is None else marked.item.session
        if marked is None or world is None or session is None or session.shouldstop or session.shouldfail:
            return
        if world.harm is None and self._shape == marked.shape and not self._port.wanted(world.number):
            self._ahead = marked
            self._send(world, marked)

    def _send(self, world: World, marked: MarkedItem) -> None:
        world.send(marked.node, marked.following.node if marked.following else None, last=marked.last)

    def _have(self, marked: MarkedItem) -> World:
        world = self._world
        if world is not None and self._ahead is marked:
            return world  # Whatever has become of it is this test's to tell.
        unfit = self._ahead is not None or self._shape != marked.shape
        if world is not None and (unfit or not world.alive or world.harm is not None):
            self._close()
            world = None
        if world is None:
            holder = Holder.here(marked.item.nodeid)
            try:
                patience = self.settings.wait if marked.shape.need is not None else None
                grant = self._port.acquire(marked.shape, holder, patience)
            except PoolError as error:
                raise pytest.fail.Exception(str(error), pytrace=False) from None
            world = self._world = World(grant, self._port)
            self._shape = marked.shape
            unready = world.start()
            if unready:
                judged = verdict.judge("setup", unready, place=marked.place, about=marked.shape.about, timeout=0)
                self._close()
                pytest.fail(verdict.plain_text(judged), pytrace=False)
        return world

    def after(self, following: MarkedItem | None) -> None:
        """Keep the world if the very next test wants the same and nobody else waits, else give it back."""
        self._error = None
        world = self._world
        if world is None or self._ahead is following is not None:
            return
        keep = (
            following is not None
            and following.missing is None
            and following.shape == self._shape
            and not following.shape.fresh
        )
        if not keep or self._ahead is not None or world.harm is not None or self._port.wanted(world.number):
            self._close()

    def end_world(self, reason: str) -> None:
        """Have the world killed."""
        if self._world is not None:
            self._world.harm = self._world.harm or reason
            self._close()

    def close(self) -> None:
        """The last test has run."""
        self._close()

    def _close(self) -> None:
        world, self._world = self._world, None
        ahead, self._ahead = self._ahead, None
        if world is not None:
            if ahead is not None:
                world.harm = world.harm or f"it runs {ahead.item.nodeid}, which is not to be run after all"
            world.close()


@functools.cache
def _without_log_capture(kind: type[pytest.Item]) -> type[pytest.Item]:
    """`kind`, its hooks less those that capture log records: it is the ranks that log, and they capture.

    The capture costs more than all else that the driver does for a test (see `let_loggers_propagate`).
    """

    class Redirected(kind):  # type: ignore[valid-type, misc]
        @property
        def ihook(self) -> Any:
            hooks = super().ihook
            # Where a conftest applies to some of the files only, pytest has a relay of its own, which is left alone.
            return self.config.stash[HOOKS] if hooks is self.config.hook else hooks

    Redirected.__name__, Redirected.__qualname__, Redirected.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    return Redirected


class _HooksWithoutLogging:
    """Made once a session."""

    def __init__(self, config: pytest.Config) -> None:
        self._manager = config.pluginmanager

    def __getattr__(self, name: str) -> Any:
        plugin = self._manager.get_plugin("logging-plugin")
        caller = self._manager.subset_hook_caller(name, [plugin] if plugin is not None else [])
        setattr(self, name, caller)
        return caller


def _raise(judged: Verdict) -> None:
    __tracebackhide__ = True
    if judged.outcome == "passed":
        return
    if judged.outcome == "skipped":
        pytest.skip(judged.message)
    if judged.outcome == "xfailed":
        pytest.xfail(judged.message.removeprefix("reason: "))
    if isinstance(judged.error, ExceptionSketch):
        raise stand_in(judged.error)
    raise (judged.error or RankError)(judged.message)


def stand_in(sketch: ExceptionSketch) -> BaseException:
    """An exception of the type that was raised in a rank, as far as this process has it, with the same text.

    Marks (``xfail(raises=...)``) and plugins (reruns by exception) look at the type's name and bases and the text; the
    object itself may not pickle, or only where it was raised.
    """
    kind: Any = sys.modules.get(sketch.module)
    for name in sketch.qualname.split("."):
        kind = getattr(kind, name, None)
    # pytest asks its own FixtureLookupError to format itself, which it can only where it was raised.
    usable = isinstance(kind, type) and issubclass(kind, Exception) and not hasattr(kind, "formatrepr")
    base = kind if usable else RankError
    text = sketch.text

    class StandIn(base):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            Exception.__init__(self, text)

        def __str__(self) -> str:
            return text

    StandIn.__name__, StandIn.__qualname__, StandIn.__module__ = (
        sketch.qualname.rpartition(".")[2],
        sketch.qualname,
        sketch.module,
    )
    error: BaseException
    try:
        error = StandIn()
    except Exception:
        error = RankError(text)
    if sketch.cause is not None:
        error.__cause__ = stand_in(sketch.cause)
    return error


def _replay_warnings(item: pytest.Item, sketches: Sequence[WarningSketch]) -> None:
    """Warnings of the ranks, each once, as if the driver had seen them."""
    for sketch in dict.fromkeys(sketches):
        category = getattr(sys.modules.get(sketch.category_module), sketch.category, None)
        if not (isinstance(category, type) and issubclass(category, Warning)):
            category = UserWarning
        message = warnings.WarningMessage(category(sketch.message), category, sketch.filename, sketch.lineno)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": sketch.location,
            }
        )
