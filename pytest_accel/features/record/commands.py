"""The commands on records: ``trace``, ``report`` and ``summary`` make files, ``census`` finds tests that never ran."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pytest_accel.core import whole_file
from pytest_accel.features.record import census
from pytest_accel.features.record.chrome_trace import trace_text
from pytest_accel.features.record.record_file import RecordError, read_record
from pytest_accel.features.record.session_summary import page, summary
from pytest_accel.features.record.timeline import Session, sessions_of

_MAKERS: dict[str, tuple[Callable[[Sequence[Session]], str], str]] = {
    "trace": (trace_text, "a trace for ui.perfetto.dev or chrome://tracing"),
    "report": (page, "an HTML page"),
    "summary": (summary, "a summary in HTML for GitHub's pages"),
}
"""The function that makes each kind of file, and its description."""


def _make_of_records(kind: str, arguments: Sequence[str]) -> int:
    make, about = _MAKERS[kind]
    parser = _parser(kind, f"Make {about} of the records of one or several sessions.")
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write (default: standard output)")
    given = parser.parse_args(arguments)
    try:
        text = make(sessions_of(map(read_record, given.files)))
        if given.output is None:
            sys.stdout.buffer.write(text.encode())  # UTF-8, whatever the terminal's encoding is.
        else:
            whole_file.write(given.output, text)
    except OSError as error:
        parser.error(f"{given.output} cannot be written: {error.strerror}")
    except RecordError as error:
        parser.error(str(error))
    return 0


def _take_census(arguments: Sequence[str]) -> int:
    about = "Check that each test ran in at least one job of a pipeline. The exit status is 1 if one did not."
    parser = _parser("census", about)
    about = "the tests that may run in no job: a node id or a pattern with * and ? on each line; # begins a comment"
    parser.add_argument("--allow", metavar="FILE", help=about)
    given = parser.parse_args(arguments)
    try:
        jobs = {file: census.read_job(file) for file in given.files}
        allow = Path(given.allow).read_text(encoding="utf-8-sig") if given.allow is not None else ""
    except RecordError as error:
        parser.error(str(error))
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{given.allow} cannot be read: {error}")
    is_proof, text = census.compare(jobs, census.parse_allow(allow), given.allow)
    encoding = sys.stdout.encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0 if is_proof else 1


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m pytest_accel {name}", description=about, allow_abbrev=False)
    parser.add_argument("files", nargs="+", metavar="FILE", help="the files that pytest --accel-record has written")
    return parser


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {kind: partial(_make_of_records, kind) for kind in _MAKERS}
COMMANDS["census"] = _take_census
