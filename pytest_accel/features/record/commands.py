"""The commands on records: ``trace``, ``report`` and ``summary`` make files, ``census`` finds tests that never ran."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Literal

from pytest_accel.core import whole_file
from pytest_accel.core.record_events import TestsCounted
from pytest_accel.features.record.record_file import RecordError, read_record
from pytest_accel.features.record.timeline import Session, sessions_of

OutputKind = Literal["trace", "report", "summary"]
_ABOUT: dict[OutputKind, str] = {
    "trace": "a trace for ui.perfetto.dev or chrome://tracing",
    "report": "an HTML page",
    "summary": "a summary in GitHub's Markdown",
}


@dataclass(frozen=True, slots=True)
class Output:
    """A file that is made of the record of one or several sessions."""

    kind: OutputKind
    path: str

    def check(self) -> None:
        """Create the folder of the file. Raise :class:`RecordError` if the file cannot be made."""
        self.check_packages()
        try:
            whole_file.check_folder(self.path)
        except OSError as error:
            raise self._error(error) from None

    def check_packages(self) -> None:
        """Raise :class:`RecordError` if a package is missing that makes the file."""
        if self.kind == "report" and find_spec("bokeh") is None:
            raise RecordError("Bokeh is not installed: pip install 'pytest-accel[report]'")

    def make(self, sessions: Sequence[Session]) -> str:
        """Return the content of the file."""
        match self.kind:
            case "trace":
                from pytest_accel.features.record.chrome_trace import trace_text

                return trace_text(sessions)
            case "report":
                from pytest_accel.features.record.report_page import page

                return page(sessions)
            case "summary":
                from pytest_accel.features.record.ci_summary import summary

                return summary(sessions)

    def write(self, sessions: Sequence[Session]) -> None:
        """Write the file. Raise :class:`RecordError` if that fails."""
        text = self.make(sessions)
        try:
            whole_file.write(self.path, text)
        except OSError as error:
            raise self._error(error) from None

    def _error(self, error: OSError) -> RecordError:
        return RecordError(f"{self.path} cannot be written: {error.strerror}")


def _make_of_records(kind: OutputKind, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m pytest_accel {kind}",
        description=f"Make {_ABOUT[kind]} of the records of one or several sessions.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the files that pytest --accel-record has written")
    is_text = kind == "summary"
    to_stdout = " (default: standard output)" if is_text else ""
    parser.add_argument("-o", "--output", required=not is_text, metavar="FILE", help=f"the file to write{to_stdout}")
    given = parser.parse_args(arguments)
    output = Output(kind, given.output or "")
    try:
        output.check_packages()
        sessions = sessions_of(map(read_record, given.files))
        if given.output is None:
            sys.stdout.buffer.write(output.make(sessions).encode())  # UTF-8, whatever the terminal's encoding is.
        else:
            output.write(sessions)
    except RecordError as error:
        parser.error(str(error))
    return 0


def _take_census(arguments: Sequence[str]) -> int:
    from pytest_accel.features.record import census_merge

    parser = argparse.ArgumentParser(
        prog="python -m pytest_accel census",
        description="Check that each test ran in at least one job of a pipeline. The exit status is 1 if one did not.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the files that pytest --accel-record has written")
    parser.add_argument(
        "--allow",
        metavar="FILE",
        help="the tests that may run in no job: a node id or a pattern with * and ? on each line; # begins a comment",
    )
    given = parser.parse_args(arguments)
    try:
        jobs = {file: counted_tests(file) for file in given.files}
        allow = [] if given.allow is None else census_merge.parse_allow(_read(given.allow))
    except RecordError as error:
        parser.error(str(error))
    merged = census_merge.merge(jobs, allow)
    text = census_merge.text(merged, given.allow)
    encoding = sys.stdout.encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0 if merged.is_proof else 1


def counted_tests(path: str) -> TestsCounted:
    """Return what became of the tests of the record `path`. Raise :class:`RecordError` if it does not say that."""
    found = [one.event for one in read_record(path) if isinstance(one.event, TestsCounted)]
    if not found:
        raise RecordError(f"{path} does not say what became of each test: its session was killed before it ended")
    return found[-1]


def _read(path: str) -> str:
    """Return the text of the file of ``--allow``."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: must be UTF-8: {error}") from None


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {kind: partial(_make_of_records, kind) for kind in _ABOUT}
COMMANDS["census"] = _take_census
