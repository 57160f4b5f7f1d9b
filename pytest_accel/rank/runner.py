"""The test runner of a rank: runs one test at a time by pytest's own protocol, and sends its reports to the driver."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, field
from os.path import relpath
from signal import signal
from traceback import format_exc, walk_tb
from typing import Any, get_args
from warnings import WarningMessage, warn_explicit

import pytest
from msgspec import structs

from pytest_accel import PreloadWarning, features
from pytest_accel.compat import torch_errors
from pytest_accel.compat.pytest_shims import forget_sections, is_subtest, rename
from pytest_accel.core.clock import monotonic
from pytest_accel.core.frames import folders_of
from pytest_accel.core.node_refs import NodeRef
from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.core.signals import INTERRUPT_SIGNAL
from pytest_accel.core.stash_keys import OWNERS
from pytest_accel.messages.rank_messages import (
    Announced,
    CannotRun,
    Collected,
    CollectFile,
    ExitRequest,
    Finished,
    Leak,
    LeakKind,
    PhaseReport,
    RunTest,
    WarningSketch,
    When,
)
from pytest_accel.messages.serialization import sketch_warning
from pytest_accel.rank import device_memory, group_state, torch_devices
from pytest_accel.rank.collector import FileSkipped, NotCollected, RankCollector
from pytest_accel.rank.context import RankContext
from pytest_accel.rank.debugger import RankDebugger
from pytest_accel.rank.leak_check import LeakCheck
from pytest_accel.rank.link_to_driver import LinkToDriver
from pytest_accel.rank.rank_output import RankOutput
from pytest_accel.rank.reports import RankReports, collect_rank_data, phase_data, serialize
from pytest_accel.settings.options import RECORD, output_path

_PHASES = frozenset(get_args(When))


@dataclass(slots=True, eq=False)
class _Test:
    """The state of one test, from its request to its last message."""

    driver: LinkToDriver
    request: RunTest
    item: pytest.Item | None = None
    """The test; None until it is found, and if its file is skipped."""
    late_teardown_error: str | None = None
    """Text of an error in the teardown of fixtures that an earlier test had left set up; None if there was none."""
    phase: When = "setup"
    """The running phase, or the last one."""
    in_phase: bool = False
    """True while a phase runs. The report of the phase comes later, so a report made meanwhile is an additional one."""
    reported: set[str] = field(default_factory=set)
    """The phases that have been reported."""
    raised: bool = False
    """True once a phase of the test or a subtest has failed, expectedly or not."""
    teardown: list[PhaseReport] = field(default_factory=list)
    """The report of the teardown if that has passed; empty before."""
    warnings: list[WarningSketch] = field(default_factory=list)


class TestRunner:
    """Pytest plugin that runs the requested tests and sends their results; one for each rank."""

    def __init__(
        self,
        context: RankContext,
        collector: RankCollector,
        debugger: RankDebugger,
        reports: RankReports,
        output: RankOutput,
    ) -> None:
        self._context = context
        self._collector = collector
        self._debugger = debugger
        self._leak_check = LeakCheck(context)
        self._reports = reports
        self._output = output
        self._raised: set[str] = set()
        """The first lines of the errors of devices that torch has raised in the running test."""
        context.announce = self.announce
        self._begun: NodeRef | None = None
        """The test for which `collect` has begun the output; None once a test has begun."""
        self._test: _Test
        """The running test, or the last one."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        """Prepare the debugger before the other plugins' hooks are called."""
        self._config = session.config
        self._records = output_path(session.config, RECORD) is not None
        self._debugger.install(session.config)
        if INTERRUPT_SIGNAL is not None:
            signal(INTERRUPT_SIGNAL, self._interrupt)
        return (yield)

    def _interrupt(self, *_: object) -> None:
        """Fail the running test after its timeout, so that its fixtures are torn down."""
        __tracebackhide__ = True
        if self._context.in_test and self._test.in_phase:
            pytest.fail("timed out", pytrace=False)

    def collect(self, session: pytest.Session, request: CollectFile) -> Collected:
        """Collect the file of a test that the driver is about to request; return whether the rank has the test."""
        node, problem = request.node, None
        session.config.stash[OWNERS].decide(request.project_marks)
        self._reports.session_devices = request.devices
        self._output.begin(node)
        self._begun = node
        try:
            self._collector.find(session, node, request.digest)
        except FileSkipped:
            # The rank has none of the file's tests, but `run` reports the requested one as skipped.
            return Collected(frozenset([node.family]), prepared=self._context.is_prepared)
        except NotCollected as error:
            text, hidden = str(error), self._reports.hidden_devices
            problem = CannotRun(f"{text} ({hidden})" if hidden and not error.headline else text, error.headline)
        except pytest.exit.Exception:
            raise
        except Exception:
            problem = CannotRun(format_exc())
        families = self._collector.families(node.path)
        unexpected = self._collector.unexpected.get(node.path, frozenset())  # A file that differs is not collected.
        return Collected(families, unexpected, problem, self._context.is_prepared)

    def run(self, session: pytest.Session, driver: LinkToDriver, request: RunTest) -> None:
        """Run the test that `driver` has requested, and send its results. The file of the test has been collected."""
        self._context.tests += 1
        self._context.exchanges.clear()
        # The driver sends no `CollectFile` if the ranks are known to have the test. Then nothing has begun its output.
        if self._begun != request.node:
            self._output.begin(request.node)
        self._begun = None
        test = self._test = _Test(driver, request)
        try:
            item = self._collector.find(session, request.node)
            device_memory.reset_peak_memory(self._context)
            rename(item, *request.names)  # In a rank, one item may be several tests of the driver.
            vars(item)["location"] = request.location  # Fill the cache of pytest's property, which would read the file.
            following = self._collector.following(session, item, request)
            if text := self._collector.tear_down_to(session, item).text:
                test.late_teardown_error = f"teardown of the fixtures kept for another test failed:\n{text}"
        except FileSkipped as skipped:
            # There is no item, so pytest's protocol cannot run: make the reports here, without its hooks.
            self._report_skipped(skipped.longrepr)
            self._finish(test)
            return
        except pytest.exit.Exception:  # For example, of a fixture that an earlier test has left set up.
            raise
        except Exception:
            driver.send(CannotRun(format_exc()))
            return
        self._raised.clear()
        torch_devices.record_errors(self._raised)
        test.item = item
        session.items, session.testscollected = [item], 1
        forget_sections(item)  # The item has run before in a rerun, or if it is several tests of the driver.
        self._debugger.driver = driver
        try:
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        finally:
            self._debugger.end()
            self._debugger.driver = None
        self._finish(test)

    def tear_down(self, session: pytest.Session, driver: LinkToDriver) -> None:
        """Tear down all fixtures after the last test, and answer `driver`."""
        driver.send(self._collector.tear_down_to(session, None))

    def exit_request(self, error: BaseException) -> ExitRequest:
        """Return the message for `error`, which ends the session: a KeyboardInterrupt or the error of `pytest.exit`."""
        folders = folders_of(self._config)
        path, line = folders.place_of_failure(
            [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        )
        reason, code = type(error).__name__, None
        if isinstance(error, pytest.exit.Exception):
            reason, code = str(error.msg), error.returncode
        return ExitRequest(self._context.rank, reason, code, f"{folders.shown(path)}:{line}")

    def announce(self, announced: Announced) -> None:
        """Send the announcements `announced` of the running call to the driver."""
        self._test.driver.send(structs.replace(announced, serial=self._test.request.serial))

    def _report_skipped(self, longrepr: Any) -> None:
        """Report a test whose file was skipped as pytest reports a skipped test."""
        for when, outcome, why in (("setup", "skipped", longrepr), ("teardown", "passed", None)):
            report = pytest.TestReport("", ("", None, ""), {}, outcome, why, when)  # type: ignore[arg-type]
            self.pytest_runtest_logreport(report)

    def _finish(self, test: _Test) -> None:
        """Send the result of a test that has run."""
        context = self._context
        try:
            failed_work = torch_devices.failed_work(context, self._raised)
            if test.raised and failed_work is None:  # torch cannot free all memory of an unusable device.
                device_memory.forget_failure(context, test.item)
            finished = self._leak_check.end(failed_work, is_expected=not test.raised)
        except Exception as error:
            # The test may have broken what is looked at here. The driver waits for the last message in any case.
            unchecked = Leak(LeakKind.UNCHECKED, f"{type(error).__name__}: {error}", lasting=True)
            finished = Finished(leaks=(unchecked,))
        finished = structs.replace(
            finished,
            serial=test.request.serial,
            warnings=tuple(test.warnings),
            late_teardown_error=test.late_teardown_error,
        )
        test.driver.send(*test.teardown, finished)

    # Hooks, called while a test runs

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_setup")
    def pytest_phase_setup(self) -> Generator[None, object, object]:
        __tracebackhide__ = True
        self._warn_of_late_variables()
        return (yield from self._phase("setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_call")
    def pytest_phase_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Look at the process before the first hook of another plugin for the call, and after the last one."""
        __tracebackhide__ = True
        self._leak_check.before_call()
        try:
            return (yield from self._phase("call"))
        finally:
            self._leak_check.after_call(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_runtest_teardown")
    def pytest_phase_teardown(self) -> Generator[None, object, object]:
        __tracebackhide__ = True
        result = yield from self._phase("teardown")
        # Fixtures may have started work on the devices in their teardown. If the test has failed, look only for leaks.
        if not self._test.raised:
            self._wait_for_devices()
        return result

    def _phase(self, when: When) -> Generator[None, object, object]:
        """Record that the phase `when` runs while the hooks of all other plugins for this phase are called."""
        __tracebackhide__ = True
        test = self._test
        test.phase, test.in_phase = when, True
        try:
            return (yield)
        finally:
            test.in_phase = False

    def _warn_of_late_variables(self) -> None:
        """Warn about variables that files have set too late, when they were imported."""
        while self._collector.late_variables:
            path, name = self._collector.late_variables.pop(0)
            text = (
                f"{relpath(path, self._config.rootpath)} sets {name}, which torch reads when it is imported: no "
                "effect in ranks, which are forked from a process that has imported torch. Set it in the mark's env=, "
                "or where pytest is started, or use accel_preload = none"
            )
            try:
                warn_explicit(text, PreloadWarning, path, 1)
            except PreloadWarning as error:
                # Show it, and go on: which test comes first in a new world must not decide which one fails.
                warning = WarningMessage(error, PreloadWarning, path, 1)
                self._test.warnings.append(sketch_warning(warning, None))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        """Run the test in the contexts of features, and wait for its devices."""
        __tracebackhide__ = True
        self._context.in_call = "call" not in self._test.reported  # False if a plugin runs the call once more.
        try:
            with ExitStack() as stack:
                features.register(self._config, "call")
                for context in self._config.hook.pytest_accel_around_call(context=self._context):
                    stack.enter_context(context)
                result = yield
            self._wait_for_devices()
            return result
        finally:
            self._context.in_call = False

    def _wait_for_devices(self) -> None:
        """Wait for the work on the rank's devices; raise RuntimeError for an error that the test has not seen."""
        __tracebackhide__ = True
        failed = torch_devices.failed_work(self._context, self._raised)
        if failed is None or failed.seen:
            return
        error = RuntimeError(f"work that the test started on {failed.device} has failed: {failed.error}")
        hint = "the place in the code is unknown, since a device runs its work later; torch's error says how to find it"
        torch_errors.add_hint(error, hint)
        self._reports.late_error = error
        raise error

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if when == "runtest":
            self._test.warnings.append(sketch_warning(warning_message, location))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send the report to the driver."""
        test = self._test
        test.driver.exit_if_forked(report)  # A copy of the rank must not report for it.
        self._debugger.end()
        serial = test.request.serial
        # The driver waits for the first report of a phase. If a plugin runs the test once more and logs that too, a
        # failure of either attempt counts, as in pytest: the later report must not replace the first.
        is_additional = test.in_phase or report.when in test.reported or is_subtest(report)
        if not is_additional and report.when not in _PHASES:
            if not report.failed:
                return  # Only a plugin knows this phase, and reports it in the driver, too.
            is_additional = True
        if is_additional:
            test.raised |= report.failed
            data = serialize(self._config, report)
            test.driver.send(PhaseReport(serial, test.phase, data))
            return
        test.raised |= report.failed or hasattr(report, "wasxfail")
        test.reported.add(report.when)
        plugin_data = b""
        exception = self._reports.exception
        if test.item is not None:
            plugin_data, invalid = collect_rank_data(test.item, report)
            exception = invalid or exception
        data = phase_data(self._config, report)
        now = monotonic() + self._context.session.clock
        phase_report = PhaseReport(serial, report.when, data, now, exception, self._collectives(report), plugin_data)
        self._reports.exception = None
        if report.passed and report.when == "teardown":
            # Sent together with the last message, which follows at once.
            test.teardown.append(phase_report)
        else:
            test.driver.send(phase_report)

    def _collectives(self, report: pytest.TestReport) -> tuple[CollectiveCall, ...]:
        """Return the collectives of the reported phase for the session's trace; empty if the session makes no trace."""
        if not self._records or "torch.distributed" not in sys.modules:
            return ()
        return group_state.collectives_between(report.start, report.stop)
