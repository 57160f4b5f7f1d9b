"""Record what happens in a session, and make files of the record. Registered only for a session that is recorded.

The process that runs a test adds details to the reports. In the controller, hooks write the events of tests, and the
pool the events of devices, worlds and waits. The files are made when the session has ended.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_accel import __version__
from pytest_accel.compat.pytest_shims import is_subtest, reason_of_skip
from pytest_accel.compat.xdist_shims import worker_of_starting_test
from pytest_accel.core import whole_file
from pytest_accel.core.frames import Folders, failure_place, folders_of, is_library
from pytest_accel.core.stash_keys import MARKED, RECORDERS, VARIANT
from pytest_accel.core.truncation import cut
from pytest_accel.features import shows_in_ci
from pytest_accel.features.record.record_file import SCHEMA, RecordError, RecordFile
from pytest_accel.features.record.session_summary import add_to_page, page
from pytest_accel.features.record.timeline import sessions_of
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession

_CHANNEL = "accel_collection"
"""Key of xdist's `workerinput` for the channel through which a worker sends the list of its tests."""
_PEAK = "accel_peak_memory"
"""Name of the property with the peak of device memory; ``[rank N]`` follows if the test has several ranks."""
_LONGEST_TEXT = 20_000
"""Characters that the record keeps of a failure, and of a section of captured output: the first and the last."""


def register(session: AccelSession) -> None:
    """Register the hooks of this process. Raise ``pytest.UsageError`` for a file that cannot be made."""
    config = session.config
    if session.worker_input is not None:
        config.pluginmanager.register(ReportDetails())
        if (channel := session.worker_input.get(_CHANNEL)) is not None:
            config.pluginmanager.register(CollectedTests(channel.send))
        return
    # A test may change the working directory.
    paths = (options.output_path(config, option) for option in (options.RECORD, options.REPORT))
    record, report = (None if path is None else os.path.realpath(path) for path in paths)
    try:
        if report is not None:
            whole_file.check_folder(report)
        file = RecordFile(record)
    except RecordError as error:
        raise pytest.UsageError(f"{options.flag(options.RECORD)}: {error}") from None
    except OSError as error:
        text = f"{report} cannot be written: {error.strerror}"
        raise pytest.UsageError(f"{options.flag(options.REPORT)}: {text}") from None
    config.stash[RECORDERS] = (file,)
    hooks = RecordHooks(session, file, record, report)
    config.pluginmanager.register(hooks, "accel-record")
    config.pluginmanager.register(ReportDetails())
    config.pluginmanager.register(CollectedTests(hooks.collections.add))


class ReportDetails:
    """Adds world and ranks of a test, and the place of a failure, to reports. In each process that runs tests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report: Any = yield
        marked: MarkedItem | None = item.stash.get(MARKED, None)
        verdict = None if marked is None else marked.verdict(call.when)
        if marked is not None and verdict is not None:
            failed = () if verdict.cause is None else verdict.cause.ranks
            details = {"world": marked.world, "failed_ranks": failed, "place": verdict.place}
            report.accel_details = msgspec.to_builtins(details | {"ranks": verdict.ranks})  # xdist sends plain data.
        elif call.excinfo is not None and report.failed:
            report.accel_details = {"place": failure_place(call.excinfo, report.longrepr, folders_of(item.config))}
        return report  # type: ignore[no-any-return]


class CollectedTests:
    """Hands over which tests one process has selected and deselected, as JSON: xdist cannot send all characters."""

    def __init__(self, hand_over: Callable[[str], None]) -> None:
        self._hand_over = hand_over
        self._found: dict[int, tuple[pytest.Item, str]] = {}
        """All tests with their ids before xdist adds groups, by `id()`."""
        self._is_complete = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        self._found = {id(item): (item, item.nodeid) for item in items}
        result = yield
        self._is_complete = True
        return result

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            self._found.setdefault(id(item), (item, item.nodeid))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        if self._is_complete:
            selected = [self._found.get(id(item), (item, item.nodeid))[1] for item in session.items]
            # Some plugins remove tests and do not report it. A test that was divided into variants is not left out.
            known = {nodeid for item, nodeid in self._found.values() if item.stash.get(VARIANT, True) is not None}
            self._hand_over(json.dumps([selected, sorted(known - set(selected))]))
        return result


class RecordHooks:
    """Writes the events of the session and its tests, and at the end page and summary. In the controller only."""

    def __init__(self, session: AccelSession, file: RecordFile, record: str | None, report: str | None) -> None:
        self._session, self._config = session, session.config
        self._folders = folders_of(session.config)
        self._file, self._record, self._report, self._in_ci = file, record, report, shows_in_ci()
        self._worker: Callable[[], str] = str
        self.collections: set[str] = set()
        """The tests that processes have collected (`CollectedTests`). Threads that receive from workers add to it."""
        self._failed_files = False
        self._skipped_files: dict[str, str] = {}
        command = list(map(str, session.config.invocation_params.args))
        about = {"session": uuid.uuid4().hex, "version": __version__, "shard": session.settings.shard}
        file("SessionStarted", schema=SCHEMA, command=command, root=self._folders.root, **about)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_CHANNEL] = node.gateway.newchannel()
        node.workerinput[_CHANNEL].setcallback(self.collections.add)

    def pytest_sessionstart(self) -> None:
        self._worker = worker_of_starting_test(self._config)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._failed_files |= report.failed
        if report.skipped:
            self._skipped_files[report.nodeid] = reason_of_skip(report.longrepr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file("TestStarted", test=nodeid, worker=self._worker())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not is_subtest(report) or report.failed:
            self._file("PhaseReported", **phase(report, self._folders))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Record the end after all other plugins have handled it: they may change the exit status."""
        if not self._session.is_forked_copy:
            self._record_collection()
        try:
            return (yield)
        finally:
            if not self._session.is_forked_copy:
                self._file("SessionFinished", status=int(session.exitstatus))
                if (error := self._file.error or self._make_files()) is not None:
                    self._session.show(f"accel: {error}")
                    if (self._record or self._report) and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                        session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _record_collection(self) -> None:
        found = [json.loads(one) for one in list(self.collections)]
        tests: Counter[str] = Counter()
        for selected, _ in found:
            tests |= Counter(selected)
        deselected = sorted({test for _, deselected in found for test in deselected})
        # pytest does not collect the tests that --last-failed leaves out.
        complete = bool(found) and not self._failed_files and not self._config.getoption("lf", False)
        fields = {"deselected": deselected, "complete": complete, "skipped_files": self._skipped_files}
        self._file("TestsCollected", tests=list(tests.elements()), **fields)

    def _make_files(self) -> str | None:
        """Write the page and the summary; return what went wrong, or None."""
        try:
            sessions = sessions_of([self._file.read()]) if self._in_ci or self._report is not None else []
            if self._in_ci and any(test.wait or test.world or test.missing for test in sessions[0].tests):
                problem = add_to_page(sessions, os.environ["GITHUB_STEP_SUMMARY"])
                if problem is not None:
                    self._session.show(f"accel: {problem}")
            if self._report is not None:
                whole_file.write(self._report, page(sessions))
        except OSError as error:
            return f"{self._report} cannot be written: {error.strerror}"
        except RecordError as error:
            return str(error)
        return None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show which files there will be; after an error, the end of the session shows that alone."""
        for kind, path in (("record", self._record), ("report", self._report)):
            if path is not None and self._file.error is None:
                terminalreporter.write_sep("-", f"accel: {kind} of the session: {path}")

    def pytest_unconfigure(self) -> None:
        self._file.close()


def phase(report: pytest.TestReport, folders: Folders) -> dict[str, Any]:
    """Return the fields of the event for `report`. Paths in rootdir are made relative to it."""
    file, line, _ = report.location
    details = getattr(report, "accel_details", {})
    fields: dict[str, Any] = {
        "test": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "start": report.start,
        "stop": report.stop,
        "worker": getattr(report, "worker_id", ""),
        "file": file,
        "line": None if line is None else line + 1,
        "xfail": getattr(report, "wasxfail", None),
        "missing": getattr(report, "accel_missing", None),
        **details,
        "place": None,
    }
    if report.skipped and fields["xfail"] is None:
        fields["skip"] = reason_of_skip(report.longrepr)
    if report.outcome not in ("passed", "skipped"):
        crash = getattr(report.longrepr, "reprcrash", None)
        place = details.get("place") or (None if crash is None else (str(crash.path), crash.lineno))
        if place:
            path = place[0] if is_library(place[0]) else folders.absolute(place[0])
            inside = path.startswith(folders.root + os.sep)
            fields["place"] = os.path.relpath(path, folders.root) if inside else path, place[1]
        text = report.longreprtext
        # The text of a missing fixture has lines of errors; the text of a doctest ends with the type of the error.
        errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
        headline = (errors or text.strip().splitlines()[-1:] or [""])[0] if crash is None else str(crash.message)
        fields["headline"] = headline.strip().partition("\n")[0]
        fields["failure"] = cut(text, _LONGEST_TEXT)
        fields["output"] = {name: cut(text, _LONGEST_TEXT) for name, text in report.sections}
    given: Iterable[tuple[object, object]] = report.user_properties  # pytest accepts names of any type.
    for name, value in given:
        if isinstance(name, str) and name.startswith(_PEAK) and isinstance(value, int):
            rank = name.removeprefix(_PEAK).removeprefix("[rank ").removesuffix("]") or "0"
            fields.setdefault("peaks", {})[rank] = value
    return {name: value for name, value in fields.items() if value is not None}
