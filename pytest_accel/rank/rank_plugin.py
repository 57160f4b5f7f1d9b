"""The plugin of a rank's pytest session, which runs tests for drivers.

The session is an ordinary pytest session with the controller's arguments, so that fixtures, parametrization, plugins
and assertion rewriting work as usual.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from os import _exit, getpid
from pickle import dumps
from socket import socket
from traceback import format_exc
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core import plugin_roles, unix_sockets
from pytest_accel.core.clock import monotonic
from pytest_accel.core.device import MaskError
from pytest_accel.core.paths import progress_path
from pytest_accel.core.rank_messages import (
    Astray,
    Broken,
    ExceptionSketch,
    ExitRequest,
    ExtraReport,
    Finished,
    PhaseReport,
    Ready,
    Retire,
    RunTest,
    WarningSketch,
)
from pytest_accel.core.serialization import plain_properties, sketch, sketch_warning, travels
from pytest_accel.core.shims import forget_sections
from pytest_accel.core.stash_keys import RANK_PLUGIN
from pytest_accel.core.truncation import cut, cut_failure
from pytest_accel.rank import group_state, process_group, rank_data, run_ahead, torch_devices
from pytest_accel.rank.captured_output import CapturedOutput
from pytest_accel.rank.collector import FileSkipped, NotCollected, RankCollector
from pytest_accel.rank.context import RANK, RankContext
from pytest_accel.rank.debugger import RankDebugger
from pytest_accel.rank.leak_check import CLEAN, LeakCheck, unknown
from pytest_accel.rank.progress_file import ProgressFile
from pytest_accel.rank.rank_log import RankLog

if TYPE_CHECKING:
    from pytest_accel.rank.hypothesis_engine import Lockstep

_WRITES_A_FILE = ("debug", "pastebin")
"""pytest's options that make a session write or send a file, which only the driver must do."""
_CHANGES_THE_RUN = (
    "lf",
    "failedfirst",
    "newfirst",
    "stepwise",
    "stepwise_skip",
    "setupshow",
    "cacheclear",
    "maxfail",
    "numprocesses",
)
"""Options of pytest and xdist that select, order, stop or distribute tests. Only the driver does that."""
_DRIVER_PLUGINS = ("lfplugin", "nfplugin", "stepwiseplugin")
"""pytest's plugins that select or order tests and store their outcomes. Only the driver uses them."""

_NO_LOCKSTEP = nullcontext()
"""Replaces the lock-step in a world with one rank, or in a suite without Hypothesis."""


class RankPlugin:
    """Runs the tests that drivers request, one driver at a time, until the pool retires the rank."""

    def __init__(
        self,
        context: RankContext,
        listener: socket,
        peers: run_ahead.Peers,
        store_port: process_group.StorePort | None,
        starting: contextlib.ExitStack,
    ) -> None:
        """`starting` has context managers that are left as soon as the session has started."""
        self.__name__ = RANK_PLUGIN  # pytest registers the plugin by this name.
        self.context = context
        self.served = False
        """True if the rank has become ready, or has told its driver that it is broken."""
        self.retired = False
        self._pid = getpid()
        self._listener = listener
        self._peers = peers
        self._store_port = store_port
        self._starting = starting
        self._connection: Connection | None = None
        self._collector = RankCollector()
        self._serial = 0
        self._sketch: ExceptionSketch | None = None
        self._warnings: list[WarningSketch] = []
        where = context.session.directory, context.spec.world, context.rank
        self._log = RankLog(context.session, context.spec.world, context.rank, context.spec.ranks)
        self._captured = CapturedOutput(*where)
        self._debugger = RankDebugger(listener, self._send)
        self._progress = ProgressFile(progress_path(*where))
        self._leak_check = LeakCheck(context)
        self._item: pytest.Item | None = None
        """The running test."""
        self._lockstep: Lockstep | None = None
        """The lock-step of the running test, if it may run examples of Hypothesis."""
        self._next_request: RunTest | None = None
        """A request that was received while another one was pending."""
        self._word: int | None = None
        """The word that this rank sent its peers for its last test (`run_ahead`); None: it sent none."""
        self._reported_early = False
        """True if the running test has already reported a subtest, or a phase that did not pass."""
        self._held: list[PhaseReport] = []
        """Reports of passed phases that are not yet sent: a test that passes costs one message."""

    # The session

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_cmdline_parse(self) -> Generator[None, pytest.Config, pytest.Config]:
        """Unset the options that write files. Must be the innermost wrapper: pytest's opens the file of ``--debug``."""
        config = yield
        for name in _WRITES_A_FILE:
            if getattr(config.option, name, None):
                setattr(config.option, name, None)
        config.option.log_file = os.devnull  # With None, pytest would use the setting in the ini file.
        return config

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._collector)
        config.pluginmanager.register(self._debugger)
        config.stash[RANK] = self.context
        option = config.option
        for name in _CHANGES_THE_RUN:
            if getattr(option, name, None):
                setattr(option, name, 0)
        if hasattr(option, "dist"):
            option.dist, option.tx = "no", []
        for name in _DRIVER_PLUGINS:
            config.pluginmanager.set_blocked(name)
        self.context.absent = plugin_roles.leave_out_absent(config.pluginmanager, dict(self.context.session.roles))

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        known = set(config.getini("markers"))
        for line in self.context.session.markers:
            if line not in known:
                config.addinivalue_line("markers", line)

    def pytest_internalerror(self, excrepr: Any) -> None:
        self._collector.errors.append(str(excrepr))

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing yet.

        This plugin is registered after pytest's plugins and before all others, so the others' hooks are called first.
        """
        session.items = []
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._starting.close()
        try:
            self._prepare()
        except MaskError as error:
            self.refuse(str(error))
            return True
        except Exception:
            self.refuse(format_exc())
            return True
        self.served = True
        while not self.retired:
            connection = self._accept()
            self._send(Ready())
            self._serve(session, connection)
        return True

    def refuse(self, text: str) -> None:
        """Wait for a driver, and tell it why this rank cannot run tests."""
        self.served = True
        with suppress(OSError):
            self._accept()
            self._send(Broken("\n".join([text, *self._collector.errors])))

    def _prepare(self) -> None:
        context, spec = self.context, self.context.spec
        if context.seen:
            torch_devices.verify(context)
        if spec.share is not None:
            torch_devices.limit_memory(context)
        if spec.grouped or context.cores:
            torch_devices.limit_threads()
        if spec.grouped:
            assert self._store_port is not None
            process_group.prepare(context, self._store_port)

    def _accept(self) -> Connection:
        self._connection = Connection(unix_sockets.accept(self._listener).detach())
        return self._connection

    def _serve(self, session: pytest.Session, connection: Connection) -> None:
        """Run tests until this driver returns the world, by closing its connection, or the pool retires the rank."""
        self._next_request = None
        while True:
            try:
                message = self._receive(connection)
            except (EOFError, OSError):
                connection.close()
                return
            if isinstance(message, Retire):
                self.retired = True
                return
            self._run(session, message)

    def _receive(self, connection: Connection) -> RunTest | Retire:
        """Return the driver's next request; if the test was sent ahead, wait until it may begin."""
        message: RunTest | Retire
        message, self._next_request = self._next_request or connection.recv(), None
        while isinstance(message, RunTest) and message.ahead:
            if self._word is not None and self._peers.agree(connection):
                return message
            newer = connection.recv()
            if isinstance(newer, RunTest) and newer.ahead:
                # The driver sends the test after the next one only when it knows that all ranks have passed. So the
                # next one may begin, although not all words of the peers have arrived.
                self._next_request = newer
                return message
            message = newer
        return message

    # One test

    def _run(self, session: pytest.Session, request: RunTest) -> None:
        self.context.tests += 1
        self._log.begin(request.node)
        self._captured.begin()
        self._serial, self._word, self._reported_early = request.serial, None, False
        self._item = self._lockstep = None
        torch_devices.reset_peak_memory(self.context.torch_device)
        stale = None
        try:
            item = self._collector.find(session, request.node)
            vars(item)["location"] = request.location  # The cache of pytest's property, which would read the file.
            following = self._collector.following(session, item, request)
            stale = self._collector.drop_stale(item)
        except FileSkipped as skipped:
            self._report_skipped(request, skipped.longrepr)
            return
        except (LookupError, NotCollected) as error:
            self._send(Broken(str(error)))
            return
        except Exception:
            self._send(Broken(format_exc()))
            return
        self._leak_check.begin(self._collector.activity)
        self._item = item
        session.items, session.testscollected = [item], 1
        forget_sections(item)
        self._debugger.running = True
        try:
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except pytest.exit.Exception as request_to_exit:
            asked = ExitRequest(request.serial, str(request_to_exit.msg), request_to_exit.returncode)
            self._send(*self._take_held(), asked)
            return
        except KeyboardInterrupt:
            asked = ExitRequest(request.serial, "KeyboardInterrupt was raised in the test", None)
            self._send(*self._take_held(), asked)
            return
        finally:
            self._debugger.end()
            self._debugger.running = False
        self._collector.ran(item, following)
        self._finish(request, stale)

    def _finish(self, request: RunTest, stale: str | None) -> None:
        warnings, self._warnings = self._warnings, []
        try:
            left = self._leak_check.end()
            collectives, groups, properties = (
                group_state.collectives(self.context),
                group_state.created_count(),
                self._properties(),
            )
        except Exception as error:
            left, collectives, groups, properties = unknown(error), {}, 0, {}
        if not self._reported_early and stale is None and left == CLEAN:
            self._word = run_ahead.word(collectives, groups)
        finished = Finished(
            request.serial,
            collectives,
            warnings=tuple(warnings),
            stale=stale,
            harm=left.harm,
            left=left.lines,
            groups=groups,
            properties=properties,
            word=self._word,
            worn=left.worn,
        )
        if self._word is not None:
            self._peers.tell(self.context.tests, self._word)
        self._send(*self._take_held(), finished)

    def _properties(self) -> dict[str, Any]:
        peak = torch_devices.peak_memory(self.context.torch_device)
        return {} if peak is None else {"accel_peak_memory": peak}

    def _report_skipped(self, request: RunTest, longrepr: Any) -> None:
        """Report a test whose file was skipped as pytest reports a skipped test."""
        for when, outcome, why in (("setup", "skipped", longrepr), ("teardown", "passed", None)):
            report = pytest.TestReport("", ("", None, ""), {}, outcome, why, when)  # type: ignore[arg-type]
            self.pytest_runtest_logreport(report)
        self._finish(request, None)

    @pytest.hookimpl(trylast=True)
    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Exempt a collector's own `setup`, which may start a notebook's kernel, from the leak check, as a fixture."""
        if type(collector).setup is pytest.Collector.setup or "setup" in vars(collector):
            return
        setup = collector.setup

        def in_wider_scope() -> None:
            __tracebackhide__ = True
            with self._leak_check.wider_fixture():
                setup()

        vars(collector)["setup"] = in_wider_scope

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Exempt fixtures of a wider scope than one test from the leak check."""
        __tracebackhide__ = True
        if fixturedef.scope == "function":
            return (yield)
        with self._leak_check.wider_fixture():
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        """Run the test in lock-step, wait for its devices, and check whether it has closed pytest's capture streams."""
        __tracebackhide__ = True
        try:
            with self._run_in_lockstep():
                result = yield
            torch_devices.wait_for_devices(self.context)
            return result
        finally:
            # A test may have replaced the streams with objects of any kind.
            self._leak_check.closed_streams = any(
                getattr(stream, "closed", False) is True for stream in (sys.stdout, sys.stderr)
            )

    def _run_in_lockstep(self) -> contextlib.AbstractContextManager[None]:
        """Make Hypothesis run the same examples as on the other ranks, if the suite has imported it."""
        if "hypothesis" not in sys.modules or self.context.spec.ranks == 1:
            return _NO_LOCKSTEP
        from pytest_accel.rank import hypothesis_engine

        self._lockstep = hypothesis_engine.Lockstep(self.context)
        return hypothesis_engine.active(self._lockstep)

    # Reports

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._sketch = sketch(call.excinfo.value) if call.excinfo is not None and report.failed else None
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._end_copy(report)
        self._debugger.end()
        self._log.end_phase()
        self._captured.end_phase()
        plugin_data = self._rank_data(report)
        data = self._serialise(report)
        if plugin_data:
            data[rank_data.KEY] = plugin_data
        data["sections"] = [(name, cut(text)) for name, text in data.get("sections", ())]
        if data.get("$report_type") != "TestReport":
            self._reported_early = True
            self._send(ExtraReport(self._serial, data))
            return
        now = monotonic() + self.context.session.clock
        if report.failed and self._lockstep is not None and self._lockstep.gave_up is not None:
            # This rank has already waited for the others in the example that failed here. Report the time of the
            # failure, so that the driver does not give them the grace period again.
            now = self._lockstep.gave_up + self.context.session.clock
        self._held.append(PhaseReport(self._serial, report.when, data, now, self._sketch))
        self._sketch = None
        if not report.passed:
            self._reported_early = True
            self._send(*self._take_held())
        elif report.when != "teardown":
            self._captured.keep(data["sections"])
            if plugin_data:
                self._send(*self._take_held())  # Before note(), from which the driver may learn that the phase passed.
            self._progress.note(self._serial, 1 if report.when == "setup" else 2, now)

    def _take_held(self) -> list[PhaseReport]:
        held, self._held = self._held, []
        return held

    def _rank_data(self, report: pytest.TestReport) -> dict[str, Any]:
        """Return the data that plugins send with `report`. Fail the report if the data is invalid."""
        if self._item is None or type(report) is not pytest.TestReport:
            return {}
        try:
            return rank_data.collect(self._item, report)
        except rank_data.FAILURES as error:
            text = str(error)
            if not isinstance(error, rank_data.RankDataError):
                text = f"pytest_accel_rank_data raised {type(error).__name__}: {error}\n{format_exc()}"
            if report.failed:
                report.sections.append(("pytest_accel_rank_data", text))
            else:
                report.outcome, report.longrepr = "failed", text
                self._sketch = sketch(rank_data.RankDataError(text))
            return {}

    def _serialise(self, report: pytest.TestReport) -> dict[str, Any]:
        if type(report) is pytest.TestReport and report.passed:
            # The only fields that a merged report uses. Serializing the others, mainly keywords, takes longer than
            # many tests.
            names = ("outcome", "longrepr", "sections", "user_properties", "duration", "wasxfail")
            kept = {name: vars(report)[name] for name in names if name in vars(report)}
            return {"$report_type": "TestReport", **kept, "user_properties": plain_properties(report.user_properties)}
        serialised: dict[str, Any] = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        if self._config.get_verbosity() < 2:
            cut_failure(serialised.get("longrepr"))
        serialised["user_properties"] = plain_properties(serialised.get("user_properties", ()))
        return {name: value for name, value in serialised.items() if travels(value)}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        """Prepare the log, the captured output and the debugger before the other plugins' hooks are called."""
        self._config = session.config
        self._log.open()
        self._captured.open(session.config)
        self._debugger.install(session.config)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        try:
            return (yield)
        finally:
            if self.retired and self.context.signed_store is not None:
                process_group.wait_for_other_ranks(self.context)

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if when == "runtest":
            self._warnings.append(sketch_warning(warning_message, location))

    def _end_copy(self, report: pytest.TestReport | None = None) -> None:
        """Exit in a process that the test forked and that has returned from the test; no-op in the rank itself."""
        if getpid() == self._pid:
            return
        failure = report.longreprtext if report is not None else ""
        assert self._connection is not None
        text = f"a process that it had forked came back out of the test\n{failure}"
        phase = "call" if report is None or report.when is None else report.when
        with suppress(OSError):
            self._connection.send_bytes(dumps((Astray(text, phase),)))
        _exit(1)

    def _send(self, *messages: object) -> None:
        self._end_copy()
        assert self._connection is not None
        with suppress(OSError):  # The driver has exited, or the pool has connected only to retire this rank.
            self._connection.send_bytes(dumps(messages))
