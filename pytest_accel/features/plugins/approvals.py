"""ApprovalTests in ranks: each rank verifies copies of the files; the driver changes the originals once."""

from __future__ import annotations

import shutil
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import require, require_parameters, take
from pytest_accel.features.plugins.rank_files import RankFiles, WrittenFiles

_NAME = "approvaltests"
_LOGS = {
    "approved": ("approved_file_log", "ApprovedFilesLog", "get_approved_files_log"),
    "failed": ("failed_comparison_log", "FailedComparisonLog", "get_failed_comparison_log"),
}
"""ApprovalTests' logs of compared files: module, class, and method that returns the path.

Scripts of ApprovalTests approve files by these logs, or delete files that are not in them.
"""


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps ApprovalTests from writing beside the tests in a rank."""
    return _InRank(config, _approver())


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that writes received files. Raise an error for an unknown release."""
    _approver()
    return _InDriver(config)


def _approver() -> Any:
    approver = take("approvaltests.file_approver", "FileApprover")
    require(approver, "verify", "verify_files", "previous_approved", "is_this_a_multiple_verify")
    require_parameters(approver.verify, "namer", "writer", "reporter", "comparator")
    return approver


def _log(name: str) -> Any:
    module, kind, path = _LOGS[name]
    log = take(f"approvaltests.internals.logs.{module}", kind)
    require(log, "log", path)
    return log


class _InRank(RankFiles):
    """Verifies copies of the running test's files, and collects the changes."""

    def __init__(self, config: pytest.Config, approver: Any) -> None:
        super().__init__(config)
        self._approver = approver
        self._logged: dict[str, list[list[str]]] = {name: [] for name in _LOGS}
        approver.verify = staticmethod(self._verify)
        for name in _LOGS:
            _log(name).log = staticmethod(lambda *_: None)  # ApprovalTests would log the names of copies.
        factory: Any = import_module("approvaltests.reporters.default_reporter_factory")
        if getattr(factory.DEFAULT_REPORTER, "instance", None) is None:
            # The default reporter opens a diff program if one is installed: it would open one for each rank.
            native: Any = import_module("approvaltests.reporters.python_native_reporter")
            factory.set_default_reporter(native.PythonNativeReporter())

    def _verify(self, namer: Any, writer: Any, reporter: Any, comparator: Any) -> str | None:
        """Do what `FileApprover.verify` does with copies of the files; return its message if they differ."""
        approver = self._approver
        approved, received = Path(namer.get_approved_filename()), Path(namer.get_received_filename())
        if approver.is_this_a_multiple_verify(str(approved)):
            message: str = approver.get_duplicate_verify_error_message(str(approved))
            return message
        approver.previous_approved.append(str(approved))
        with TemporaryDirectory(dir=self.temporary) as name, redirect_stdout(StringIO()) as output:
            stage = Path(name)
            staged = stage / approved.name
            if approved.is_file():
                shutil.copyfile(approved, staged)
            staged_received = Path(writer.write_received_file(str(stage / received.name)))
            received = received.with_name(staged_received.name)
            verified = False
            try:
                verified = approver.verify_files(str(staged), str(staged_received), reporter, comparator)
            finally:
                self._logged["approved"].append([str(approved)])
                self._take(approved, staged)
                self._take(received, staged_received)
                if not verified:
                    self._logged["failed"].append([str(received), str(approved)])
        print(output.getvalue().replace(name, str(approved.parent)), end="")
        if verified:
            return None
        return f"Approval Mismatch, received != approved\n\tApproved: {approved}\n\tReceived: {received} "

    def _take(self, path: Path, staged: Path) -> None:
        """Have the driver make the file `path` the same as its copy `staged`: write, delete or keep it."""
        old, new = (file.read_bytes() if file.is_file() else None for file in (path, staged))
        if new == old:
            self.keep(path)
        elif new is not None:
            self.write(path, new)
        else:
            self.delete(path)

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
        logged, self._logged = self._logged, {name: [] for name in _LOGS}
        return {**super().send(item, report), "logged": logged}


class _InDriver(WrittenFiles):
    """Writes received files on which all ranks agree, and logs the files that ranks have compared."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(_NAME, config)
        self._log = {name: _log(name).log for name in _LOGS}
        self._lines: dict[str, dict[tuple[str, ...], None]] = {name: {} for name in _LOGS}
        """The lines that this session has logged, in order, without repetition."""
        for name in _LOGS:
            _log(name).log = staticmethod(partial(self._note, name))

    def _note(self, name: str, *line: str) -> None:
        self._lines[name][line] = None
        self._log[name](*line)

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> list[str]:
        for name in _LOGS:
            for line in dict.fromkeys(tuple(line) for one in sent.values() for line in one["logged"][name]):
                self._note(name, *line)
        return super().merge(item, report, sent)

    def pytest_sessionfinish(self) -> None:
        """Log lost lines again: any process that imports ApprovalTests, such as the fork server, empties the logs."""
        for name, (_, _, path) in _LOGS.items():
            noted = set(getattr(_log(name), path)().read_text(encoding="utf-8").splitlines())
            for line in self._lines[name]:
                if " -> ".join(line) not in noted:
                    self._log[name](*line)
