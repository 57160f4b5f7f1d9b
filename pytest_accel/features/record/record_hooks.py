"""Record what happens in a session, and make files of the record. Registered only for a session that is recorded.

The process that runs a test adds what only it knows to the reports. The controller writes the events: its hooks those
of tests, and the pool those of devices, worlds and waits. The files are made when the session has ended.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_accel import __version__
from pytest_accel.core.frames import Folders, failure_place, folders_of, is_library
from pytest_accel.core.record_events import (
    SCHEMA,
    PhaseReported,
    RankPhase,
    SessionFinished,
    SessionStarted,
    TestStarted,
)
from pytest_accel.core.shims import is_subtest, reason_of_skip, worker_of_starting_test
from pytest_accel.core.stash_keys import LAUNCHED_RANKS, MARKED, RECORDERS
from pytest_accel.core.truncation import cut
from pytest_accel.features.record import census_hooks
from pytest_accel.features.record.commands import Output
from pytest_accel.features.record.failed_subtests import FailedSubtests
from pytest_accel.features.record.record_file import RecordError, RecordFile
from pytest_accel.features.record.timeline import Session, sessions_of
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession

_PEAK = "accel_peak_memory"
"""Name of the property with the peak of device memory; ``[rank N]`` follows if the test has several ranks."""
_SUCCESSFUL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
_LONGEST_TEXT = 20_000
"""Characters that the record keeps of a failure, and of a section of captured output: the first and the last."""


def register(session: AccelSession, *, in_ci: bool) -> None:
    """Register the hooks of this process. Raise ``pytest.UsageError`` for a file that cannot be made.

    With `in_ci`, the CI system shows a summary of the session, whether a file was asked for or not.
    """
    config = session.config
    # A test may change the working directory.
    record, report = (
        None if (path := options.output_path(config, option)) is None else os.path.realpath(path)
        for option in (options.RECORD, options.REPORT)
    )
    if session.is_worker:
        config.pluginmanager.register(ReportDetails(folders_of(config)))
        if record is not None:
            census_hooks.register(session, None)
        return
    required = record is not None or report is not None
    option = options.REPORT if record is None else options.RECORD
    chosen = [] if report is None else [Output("report", report)]
    try:
        file = RecordFile(record)
        for output in chosen:
            option = options.REPORT
            output.check()
    except RecordError as error:
        if required:
            raise pytest.UsageError(f"{options.flag(option)}: {error}") from None
        print(f"accel: {error}", file=sys.stderr)  # The session runs without a summary; it has no terminal yet.
        return
    config.stash[RECORDERS] = (file,)
    config.pluginmanager.register(RecordHooks(session, file, chosen, required=required, in_ci=in_ci), "accel-record")
    if record is not None:
        census_hooks.register(session, file)
    if not options.is_distributed(config):
        config.pluginmanager.register(ReportDetails(folders_of(config)))


class _Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """The data that the process which ran a phase of a test adds to its report."""

    process: int
    world: int = 0
    ranks: tuple[RankPhase, ...] = ()
    failed_ranks: tuple[int, ...] = ()
    place: tuple[str, int] | None = None
    """File and line of the failure; None if they are those of the report's `longrepr`."""
    headline: str = ""
    """Type and first line of the exception of a failure whose `longrepr` has no such line; else empty."""


class ReportDetails:
    """Adds the place of a failure, and the process, the world and the ranks of a test, to the reports of its phases.

    Registered in each process that runs tests.
    """

    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marked: MarkedItem | None = item.stash.get(MARKED, None)
        verdict = None if marked is None else marked.verdict(call.when)
        if marked is not None and verdict is not None:
            details = _Details(os.getpid(), marked.world, verdict.ranks, verdict.failed_ranks, verdict.place)
        elif call.excinfo is not None and report.failed:
            details = _details_of_failure(call.excinfo, report.longrepr, self._folders)
        else:
            details = _Details(os.getpid())
        report.accel_details = msgspec.to_builtins(details)  # type: ignore[attr-defined]  # xdist sends plain data only.
        return report


def _details_of_failure(excinfo: pytest.ExceptionInfo[BaseException], longrepr: object, folders: Folders) -> _Details:
    """Return the details of a phase that has failed in this process."""
    place, text = failure_place(excinfo, longrepr, folders), ""
    if place is not None and not hasattr(longrepr, "reprcrash"):  # It is a doctest.
        from pytest_accel.core.serialization import sketch
        from pytest_accel.verdict.sentences import headline

        text = headline(sketch(excinfo.value))
    return _Details(os.getpid(), place=place, headline=text)


class RecordHooks:
    """Writes the events of the session and its tests, and at the end what is made of them. In the controller only."""

    def __init__(
        self, session: AccelSession, file: RecordFile, outputs: Sequence[Output], *, required: bool, in_ci: bool
    ) -> None:
        """`required` is False if the events are recorded only for the summary that a CI system shows (`in_ci`)."""
        self._session = session
        self._required = required
        self._in_ci = in_ci
        self._lacks_hardware = False
        """True if a test was skipped for missing hardware."""
        self._config = session.config
        self._record = file
        self._outputs = outputs
        self._worker: Callable[[], str] = str
        self._folders = folders_of(session.config)
        self._failed_subtests = FailedSubtests()
        self._process = 0 if options.is_distributed(session.config) else os.getpid()
        """The process that runs the tests; 0 if the workers do."""
        arguments = tuple(map(str, session.config.invocation_params.args))
        file(
            SessionStarted(
                SCHEMA,
                session=uuid.uuid4().hex,
                version=__version__,
                command=arguments,
                root=self._folders.root,
                shard=session.settings.shard,
            )
        )

    def pytest_sessionstart(self) -> None:
        self._worker = worker_of_starting_test(self._config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._record(TestStarted(nodeid, self._worker()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._lacks_hardware |= hasattr(report, "accel_missing")
        if is_subtest(report):
            self._failed_subtests.add(report)
            return
        event = phase_reported(report, self._folders, self._process)
        if (subtest := self._failed_subtests.pop(report)) is not None:
            event = msgspec.structs.replace(event, outcome="failed", **_failure(subtest, self._folders))
        self._record(event)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Record the end after all other plugins have handled it: they may change the exit status."""
        try:
            return (yield)
        finally:
            if not self._session.is_forked_copy:
                self._record(SessionFinished(int(session.exitstatus)))
                error = self._record.error
                # Without both of these there are no marked tests, and the record need not be read.
                may_have_marked = self._session.started_pool is not None or self._lacks_hardware
                in_ci = self._in_ci and may_have_marked
                try:
                    if (self._outputs or in_ci) and error is None:
                        sessions = sessions_of([self._record.read()])
                        if in_ci and any(test.is_marked for test in sessions[0].tests):
                            self._show_in_ci(sessions)
                        for output in self._outputs:
                            output.write(sessions)
                except RecordError as problem:
                    error = str(problem)
                if error is not None:
                    self._session.show(f"accel: {error}")
                    if self._required and session.exitstatus in _SUCCESSFUL:
                        session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _show_in_ci(self, sessions: Sequence[Session]) -> None:
        from pytest_accel.features.record import ci_summary

        # That plugin annotates failures itself.
        annotate = not self._config.pluginmanager.has_plugin("pytest_github_actions_annotate_failures")
        for line in ci_summary.show(sessions, os.environ, annotate=annotate):
            self._session.show(line)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show which files there will be."""
        path = options.output_path(self._config, options.RECORD)
        files = [] if path is None else [f"record of the session: {self._record.name}"]
        for text in [*files, *(f"{output.kind} of the session: {output.path}" for output in self._outputs)]:
            terminalreporter.write_sep("-", f"accel: {text}")

    def pytest_unconfigure(self) -> None:
        self._record.close()


def phase_reported(report: pytest.TestReport, folders: Folders, process: int) -> PhaseReported:
    """Return the event for `report` from the process with the id `process`, or the one that the report names.

    Paths in rootdir are made relative to it.
    """
    file, line, _ = report.location
    failed = report.failed or report.outcome not in ("passed", "failed", "skipped")
    xfail: str | None = getattr(report, "wasxfail", None)
    # Most phases have none of these: each field that is given costs time.
    more: dict[str, Any] = _failure(report, folders) if failed else {}
    if report.skipped and xfail is None:
        more["skip"] = reason_of_skip(report.longrepr)
    if (details := _details(report)) is not None:
        process = details.process
        more |= {"world": details.world, "ranks": details.ranks, "failed_ranks": details.failed_ranks}
    if report.sections:
        more["output_sizes"] = {name: len(text) for name, text in report.sections}
    if report.user_properties:
        given: Iterable[tuple[object, object]] = report.user_properties  # pytest accepts names of any type.
        properties = {name: value for name, value in given if isinstance(name, str)}
        more["peaks"] = _peaks(properties)
        more["launched"] = _launched(report.user_properties)
    return PhaseReported(
        test=report.nodeid,
        when=report.when,
        outcome=report.outcome,
        start=report.start,
        stop=report.stop,
        worker=getattr(report, "worker_id", ""),
        process=process,
        file=file,
        line=None if line is None else line + 1,
        xfail=xfail,
        missing=getattr(report, "accel_missing", None),
        **more,
    )


def _details(report: pytest.TestReport) -> _Details | None:
    return msgspec.convert(report.accel_details, _Details) if hasattr(report, "accel_details") else None


def _failure(report: pytest.TestReport, folders: Folders) -> dict[str, Any]:
    """Return the fields of the event that only a phase has that did not pass."""
    details = _details(report)
    return {
        "headline": _headline(report, details),
        "place": _place(report, details, folders),
        "failure": cut(report.longreprtext, _LONGEST_TEXT),
        "output": {name: cut(text, _LONGEST_TEXT) for name, text in report.sections},
    }


def _place(report: pytest.TestReport, details: _Details | None, folders: Folders) -> tuple[str, int] | None:
    """Return the file and line of the failure in `report`, the same as those on the terminal; None if it has none."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if details is not None and details.place is not None:
        path, line = details.place
    elif crash is not None:
        path, line = str(crash.path), int(crash.lineno)
    else:
        return None
    return _relative(path if is_library(path) else folders.absolute(path), folders.root), line


def _headline(report: pytest.TestReport, details: _Details | None) -> str:
    if details is not None and details.headline:
        return details.headline
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash is not None else report.longreprtext).strip().splitlines()
    return lines[0] if lines else ""


def _peaks(properties: Mapping[str, object]) -> dict[str, int]:
    """Return the peak of device memory in bytes by rank, from the properties of a report."""
    return {
        name[len(_PEAK) :].removeprefix("[rank ").removesuffix("]") or "0": value
        for name, value in properties.items()
        if name.startswith(_PEAK) and isinstance(value, int)
    }


def _launched(properties: Iterable[tuple[object, object]]) -> int:
    """Return the most ranks that a launch has started, from the properties of a report."""
    found = (value for name, value in properties if isinstance(name, str) and name.partition("[")[0] == LAUNCHED_RANKS)
    return max((value for value in found if isinstance(value, int)), default=0)


def _relative(path: str, root: str) -> str:
    return os.path.relpath(path, root) if path.startswith(root + os.sep) else path
