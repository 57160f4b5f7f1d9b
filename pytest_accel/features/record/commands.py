"""The commands ``trace``, ``report`` and ``summary`` of ``python -m pytest_accel``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from pytest_accel.features.record import outputs
from pytest_accel.features.record.record_file import RecordError, read_record
from pytest_accel.features.record.timeline import sessions_of


def _from_records(name: str, about: str, arguments: Sequence[str]) -> int:
    """Make a file of records; `name` is both the command and the function of `outputs`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m pytest_accel {name}",
        description=f"Make {about} of the records of one or several sessions.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the files that pytest --accel-record has written")
    is_text = name == "summary"
    to_stdout = " (default: standard output)" if is_text else ""
    parser.add_argument("-o", "--output", required=not is_text, metavar="FILE", help=f"the file to write{to_stdout}")
    given = parser.parse_args(arguments)
    try:
        output = {"trace": outputs.trace, "report": outputs.report, "summary": outputs.summary}[name](given.output)
        sessions = sessions_of(map(read_record, given.files))
        if given.output is None:
            sys.stdout.buffer.write(output.make(sessions).encode())  # UTF-8, whatever the terminal's encoding is.
        else:
            output.write(sessions)
    except RecordError as error:
        parser.error(str(error))
    return 0


COMMANDS = {
    "trace": partial(_from_records, "trace", "a trace for ui.perfetto.dev or chrome://tracing"),
    "report": partial(_from_records, "report", "an HTML page"),
    "summary": partial(_from_records, "summary", "a summary in GitHub's Markdown"),
}
