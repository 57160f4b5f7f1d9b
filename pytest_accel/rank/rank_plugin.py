"""The pytest session inside a rank, and how it serves a driver.

The session is a real one, with the controller's arguments, so that fixtures, parametrization, plugins and assertion
rewriting are the real ones.
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
from pytest_accel.core.messages import (
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
from pytest_accel.core.paths import progress_path
from pytest_accel.core.serialization import plain_properties, sketch, sketch_warning, travels
from pytest_accel.core.shims import forget_sections
from pytest_accel.core.stash_keys import RANK_PLUGIN
from pytest_accel.core.truncation import cut, cut_failure
from pytest_accel.rank import process_group, rank_data, run_ahead
from pytest_accel.rank.captured_output import Captured
from pytest_accel.rank.collector import Catalogue, FileSkipped, NotCollected
from pytest_accel.rank.context import RANK, RankContext
from pytest_accel.rank.debugger import Debugging
from pytest_accel.rank.leak_check import CLEAN, Hygiene, unknown
from pytest_accel.rank.progress_file import Progress
from pytest_accel.rank.rank_log import Log

if TYPE_CHECKING:
    from pytest_accel.rank.hypothesis_engine import Lockstep

_WRITES_A_FILE = ("debug", "pastebin")
"""pytest's own options by which a session writes a file, or sends one: the driver's business."""
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
"""Options of pytest and xdist by which a session selects, orders, stops or distributes tests."""
_JUDGES_IN_THE_DRIVER = ("lfplugin", "nfplugin", "stepwiseplugin")
"""pytest's own plugins that select or order tests, and remember how they ended."""

_ALONE = nullcontext()
"""Stands in for the lock-step of a rank that has no peers, or of a suite without Hypothesis."""


class RankPlugin:
    """Makes a pytest session serve a driver."""

    def __init__(
        self,
        context: RankContext,
        listener: socket,
        others: run_ahead.Peers,
        meeting: process_group.Meeting | None,
        starting: contextlib.ExitStack,
    ) -> None:
        """`starting` is what holds until the session has started, and no longer."""
        self.__name__ = RANK_PLUGIN  # The name by which pytest registers it.
        self.context = context
        self.served = False
        self.retired = False
        self._pid = getpid()
        self._listener = listener
        self._peers = others
        self._meeting = meeting
        self._starting = starting
        self._connection: Connection | None = None
        self._catalogue = Catalogue()
        self._serial = 0
        self._sketch: ExceptionSketch | None = None
        self._warnings: list[WarningSketch] = []
        where = context.session.directory, context.spec.world, context.rank
        self._log = Log(context.session, context.spec.world, context.rank, context.spec.ranks)
        self._captured = Captured(*where)
        self._debugging = Debugging(listener, self._send)
        self._progress = Progress(progress_path(*where))
        self._hygiene = Hygiene(context)
        self._item: pytest.Item | None = None
        """The running test."""
        self._lockstep: Lockstep | None = None
        """Of the running test, once it may run examples of Hypothesis."""
        self._later: RunTest | None = None
        self._word: int | None = None
        """What this rank has told its peers of its last test."""
        self._spoke = False
        """Whether the driver has heard of the running test, as it does where something is wrong."""
        self._held: list[PhaseReport] = []
        """Phases that have passed and are not yet reported: one message a test, unless something goes wrong."""

    # The session

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_cmdline_parse(self) -> Generator[None, pytest.Config, pytest.Config]:
        """Leave the session's files to the driver: innermost, since pytest opens that of ``--debug`` next."""
        config = yield
        for name in _WRITES_A_FILE:
            if getattr(config.option, name, None):
                setattr(config.option, name, None)
        config.option.log_file = os.devnull  # None would leave it to the ini file.
        return config

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._catalogue)
        config.pluginmanager.register(self._debugging)
        config.stash[RANK] = self.context
        option = config.option
        for name in _CHANGES_THE_RUN:
            if getattr(option, name, None):
                setattr(option, name, 0)
        if hasattr(option, "dist"):
            option.dist, option.tx = "no", []
        for name in _JUDGES_IN_THE_DRIVER:
            config.pluginmanager.set_blocked(name)
        self.context.absent = plugin_roles.leave_out_absent(config.pluginmanager, dict(self.context.session.roles))

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        known = set(config.getini("markers"))
        for line in self.context.session.markers:
            if line not in known:
                config.addinivalue_line("markers", line)

    def pytest_internalerror(self, excrepr: Any) -> None:
        self._catalogue.errors.append(str(excrepr))

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing yet. This plugin is registered after pytest's own and before all others, which come first."""
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
        """Tell the driver why this rank cannot run anything."""
        self.served = True
        with suppress(OSError):
            self._accept()
            self._send(Broken("\n".join([text, *self._catalogue.errors])))

    def _prepare(self) -> None:
        context, spec = self.context, self.context.spec
        if context.seen:
            self._verify()
        if spec.share is not None:
            process_group.limit_memory(context)
        if spec.grouped or context.cores:
            process_group.limit_threads()
        if spec.grouped:
            assert self._meeting is not None
            process_group.prepare(context, self._meeting)

    def _verify(self) -> None:
        seen = self.context.seen
        try:
            self.context.vendor.verify(seen, os.environ)
        except (AssertionError, ImportError, OSError, RuntimeError) as error:  # torch's own.
            names = ", ".join(device.id for device in seen)
            raise MaskError(
                f"the process has been given {names}, which torch cannot use: {type(error).__name__}: {error}"
            ) from error

    def _accept(self) -> Connection:
        self._connection = Connection(unix_sockets.accept(self._listener).detach())
        return self._connection

    def _serve(self, session: pytest.Session, connection: Connection) -> None:
        """Until this driver gives the world back, by closing its connection, or the pool retires it."""
        self._later = None
        while True:
            try:
                message = self._hear(connection)
            except (EOFError, OSError):
                connection.close()
                return
            if isinstance(message, Retire):
                self.retired = True
                return
            self._run(session, message)

    def _hear(self, connection: Connection) -> RunTest | Retire:
        """What the driver wants done, when it is time to do it."""
        message: RunTest | Retire
        message, self._later = self._later or connection.recv(), None
        while isinstance(message, RunTest) and message.ahead:
            if self._word is not None and self._peers.agree(connection):
                return message
            said = connection.recv()
            if isinstance(said, RunTest) and said.ahead:
                # The one after: the driver knows that all have passed, which the peers were about to say.
                self._later = said
                return message
            message = said
        return message

    # One test

    def _run(self, session: pytest.Session, request: RunTest) -> None:
        self.context.tests += 1
        self._log.begin(request.node)
        self._captured.begin()
        self._serial, self._word, self._spoke = request.serial, None, False
        self._item = self._lockstep = None
        process_group.reset_peak_memory(self.context.torch_device)
        stale = None
        try:
            item = self._catalogue.find(session, request.node)
            vars(item)["location"] = request.location  # Where pytest keeps it once it has been looked up.
            following = self._catalogue.following(session, item, request)
            stale = self._catalogue.drop_stale(item)
        except FileSkipped as skipped:
            self._report_skipped(request, skipped.longrepr)
            return
        except (LookupError, NotCollected) as error:
            self._send(Broken(str(error)))
            return
        except Exception:
            self._send(Broken(format_exc()))
            return
        self._hygiene.begin(self._catalogue.activity)
        self._item = item
        session.items, session.testscollected = [item], 1
        forget_sections(item)
        self._debugging.running = True
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
            self._debugging.end()
            self._debugging.running = False
        self._catalogue.ran(item, following)
        self._finish(request, stale)

    def _finish(self, request: RunTest, stale: str | None) -> None:
        warnings, self._warnings = self._warnings, []
        try:
            left = self._hygiene.end()
            collectives, groups, properties = (
                process_group.collectives(self.context),
                process_group.made(),
                self._properties(),
            )
        except Exception as error:
            left, collectives, groups, properties = unknown(error), {}, 0, {}
        if not self._spoke and stale is None and left == CLEAN:
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
        peak = process_group.peak_memory(self.context.torch_device)
        return {} if peak is None else {"accel_peak_memory": peak}

    def _report_skipped(self, request: RunTest, longrepr: Any) -> None:
        """As pytest would have reported it, had it skipped the test and not its file."""
        for when, outcome, why in (("setup", "skipped", longrepr), ("teardown", "passed", None)):
            report = pytest.TestReport("", ("", None, ""), {}, outcome, why, when)  # type: ignore[arg-type]
            self.pytest_runtest_logreport(report)
        self._finish(request, None)

    @pytest.hookimpl(trylast=True)
    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Treat what a collector's own `setup` makes, such as a notebook's kernel, as made by a wider fixture."""
        if type(collector).setup is pytest.Collector.setup or "setup" in vars(collector):
            return
        setup = collector.setup

        def in_wider_scope() -> None:
            __tracebackhide__ = True
            with self._hygiene.wider_fixture():
                setup()

        vars(collector)["setup"] = in_wider_scope

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """What a fixture makes or sets for more than one test is not left over when the test ends."""
        __tracebackhide__ = True
        if fixturedef.scope == "function":
            return (yield)
        with self._hygiene.wider_fixture():
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        """Looks at the streams while they are those that pytest captures with, and at what the devices have done."""
        __tracebackhide__ = True
        try:
            with self._in_step():
                result = yield
            process_group.wait_for_devices(self.context)
            return result
        finally:
            # What a test has put in their place may be anything.
            self._hygiene.closed_streams = any(
                getattr(stream, "closed", False) is True for stream in (sys.stdout, sys.stderr)
            )

    def _in_step(self) -> contextlib.AbstractContextManager[None]:
        """Have Hypothesis run the same examples as on the other ranks, where the suite has imported it."""
        if "hypothesis" not in sys.modules or self.context.spec.ranks == 1:
            return _ALONE
        from pytest_accel.rank import hypothesis_engine

        self._lockstep = hypothesis_engine.Lockstep(self.context)
        return hypothesis_engine.active(self._lockstep)

    # What the test reports

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
        self._debugging.end()
        self._log.end_phase()
        self._captured.end_phase()
        sent = self._rank_data(report)
        data = self._serialise(report)
        if sent:
            data[rank_data.KEY] = sent
        data["sections"] = [(name, cut(text)) for name, text in data.get("sections", ())]
        if data.get("$report_type") != "TestReport":
            self._spoke = True
            self._send(ExtraReport(self._serial, data))
            return
        now = monotonic() + self.context.session.clock
        if report.failed and self._lockstep is not None and self._lockstep.gave_up is not None:
            # The others have had their grace: this rank has waited for them in an example that failed here.
            now = self._lockstep.gave_up + self.context.session.clock
        self._held.append(PhaseReport(self._serial, report.when, data, now, self._sketch))
        self._sketch = None
        if not report.passed:
            self._spoke = True
            self._send(*self._take_held())
        elif report.when != "teardown":
            self._captured.keep(data["sections"])
            if sent:
                self._send(*self._take_held())  # The note below may be all that the driver waits for.
            self._progress.note(self._serial, 1 if report.when == "setup" else 2, now)

    def _take_held(self) -> list[PhaseReport]:
        held, self._held = self._held, []
        return held

    def _rank_data(self, report: pytest.TestReport) -> dict[str, Any]:
        """Return what plugins send with `report`. Fail the report if they send what they must not."""
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
            # All that a merged report takes from it. The rest, keywords above all, costs more than the test.
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
        """Get ready before other plugins begin their session: their wrappers too."""
        self._config = session.config
        self._log.open()
        self._captured.open(session.config)
        self._debugging.install(session.config)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self) -> Generator[None, None, None]:
        try:
            return (yield)
        finally:
            if self.retired and self.context.signed_store is not None:
                process_group.end_together(self.context)

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if when == "runtest":
            self._warnings.append(sketch_warning(warning_message, location))

    def _end_copy(self, report: pytest.TestReport | None = None) -> None:
        """End a process that the test forked and that has come out of the test, where only one can go on."""
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
        with suppress(OSError):  # Nobody listens: a driver that is gone, or the pool, to retire this rank.
            self._connection.send_bytes(dumps(messages))
