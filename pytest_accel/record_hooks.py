"""Record what happens in a session, and make files of the record. Registered only for a session that is recorded.

The process that runs a test adds what only it knows to the reports. The controller writes the events: its hooks those
of tests, and the pool those of devices, worlds and waits. The files are made when the session has ended.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import __version__
from pytest_accel.core.record_events import (
    SCHEMA,
    PhaseReported,
    RankPhase,
    SessionFinished,
    SessionStarted,
    TestStarted,
)
from pytest_accel.core.skip_text import reason_of_skip
from pytest_accel.core.stash_keys import MARKED, RECORDER, RETRIED
from pytest_accel.core.truncation import cut
from pytest_accel.record import outputs
from pytest_accel.record.outputs import Output
from pytest_accel.record.record_file import RecordError, RecordFile
from pytest_accel.record.timeline import sessions_of
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession

_PEAK = "accel_peak_memory"
"""Name of the property with the peak of device memory; ``[rank N]`` follows if the test has several ranks."""
_SUCCESSFUL = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
_LONGEST_TEXT = 20_000
"""Characters that the record keeps of a failure, and of a section of captured output: the first and the last."""


_OUTPUTS = {options.TRACE: outputs.trace, options.REPORT: outputs.report}


def register(session: AccelSession) -> None:
    """Register the hooks of this process. Raise ``pytest.UsageError`` for a file that cannot be made."""
    config = session.config
    config.pluginmanager.register(ReportDetails(), "accel-record-details")
    if session.is_worker:
        return
    # A test may change the working directory.
    paths = {
        option: os.path.realpath(path)
        for option in options.FROM_RECORD
        if (path := options.output_path(config, option)) is not None
    }
    option = options.RECORD
    made = []
    try:
        file = RecordFile(paths.pop(option, None))
        for option, path in paths.items():
            made.append(_OUTPUTS[option](path))
            made[-1].check()
    except RecordError as error:
        raise pytest.UsageError(f"{options.flag(option)}: {error}") from None
    config.stash[RECORDER] = file
    config.pluginmanager.register(RecordHooks(session, file, made), "accel-record")


class ReportDetails:
    """Adds the process, the world and the ranks of a test to the reports of its phases."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        # Plain data, which xdist can send.
        details: dict[str, object] = {"process": os.getpid()}
        marked: MarkedItem | None = item.stash.get(MARKED, None)
        verdict = None if marked is None else marked.verdict(call.when)
        if marked is not None and verdict is not None:
            details["world"] = marked.world
            details["ranks"] = [astuple(one) for one in verdict.ranks]
            details["failed_ranks"] = list(verdict.failed_ranks)
        report.accel_details = details  # type: ignore[attr-defined]
        return report


class RecordHooks:
    """Writes the events of the session and its tests, and at the end what is made of them. In the controller only."""

    def __init__(self, session: AccelSession, file: RecordFile, made: Sequence[Output]) -> None:
        self._session = session
        self._config = session.config
        self._record = file
        self._made = made
        arguments = tuple(map(str, session.config.invocation_params.args))
        file(
            SessionStarted(
                SCHEMA,
                session=uuid.uuid4().hex,
                version=__version__,
                command=arguments,
                root=str(session.config.rootpath),
                shard=session.settings.shard,
            )
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._record(TestStarted(nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "context"):  # A subtest's report; a failed subtest fails its test.
            self._record(phase_reported(report, str(self._config.rootpath)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Record the end after all other plugins have handled it: they may change the exit status."""
        try:
            return (yield)
        finally:
            if not self._session.is_forked_copy:
                self._record(SessionFinished(int(session.exitstatus)))
                error = self._record.error
                try:
                    if self._made and error is None:
                        sessions = sessions_of([self._record.read()])
                        for output in self._made:
                            output.write(sessions)
                except RecordError as problem:
                    error = str(problem)
                if error is not None:
                    self._session.show(f"accel: {error}")
                    if session.exitstatus in _SUCCESSFUL:
                        session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show which files there will be."""
        path = options.output_path(self._config, options.RECORD)
        files = [] if path is None else [f"record of the session: {self._record.name}"]
        for text in [*files, *(f"{output.about} of the session: {output.path}" for output in self._made)]:
            terminalreporter.write_sep("-", f"accel: {text}")

    def pytest_unconfigure(self) -> None:
        self._record.close()


def phase_reported(report: pytest.TestReport, root: str) -> PhaseReported:
    """Return the event for `report`. Paths below the folder `root` are made relative to it."""
    details: Mapping[str, Any] = getattr(report, "accel_details", {})
    properties = dict(report.user_properties)
    file, line, _ = report.location
    failed = report.failed or report.outcome not in ("passed", "failed", "skipped")
    crash = getattr(report.longrepr, "reprcrash", None)
    xfail: str | None = getattr(report, "wasxfail", None)
    return PhaseReported(
        test=report.nodeid,
        when=report.when,
        outcome=report.outcome,
        start=report.start,
        stop=report.stop,
        worker=getattr(report, "worker_id", ""),
        process=details.get("process", 0),
        file=file,
        line=None if line is None else line + 1,
        world=details.get("world", 0),
        ranks=tuple(RankPhase(*one) for one in details.get("ranks", ())),
        xfail=xfail,
        skip=reason_of_skip(report.longrepr) if report.skipped and xfail is None else None,
        missing=getattr(report, "accel_missing", None),
        headline=_headline(report) if failed else "",
        failure=cut(report.longreprtext, _LONGEST_TEXT) if failed else "",
        place=None if not failed or crash is None else (_relative(str(crash.path), root), int(crash.lineno)),
        failed_ranks=tuple(details.get("failed_ranks", ())),
        output={name: cut(text, _LONGEST_TEXT) for name, text in report.sections} if failed else {},
        output_sizes={name: len(text) for name, text in report.sections},
        peaks=_peaks(properties),
        retried=properties.get(RETRIED),  # type: ignore[arg-type]
    )


def _headline(report: pytest.TestReport) -> str:
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


def _relative(path: str, root: str) -> str:
    return os.path.relpath(path, root) if path.startswith(root + os.sep) else path
