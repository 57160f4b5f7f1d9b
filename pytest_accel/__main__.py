"""``python -m pytest_accel``: commands that need no pytest session."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings import options
from pytest_accel.settings.machine import machine_for

_COMMANDS = ("info", "doctor", "census", "durations", "trace", "report", "summary")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    It is 1 if the doctor finds a problem, a vendor is broken, or a test of the censuses ran in no job. Raise SystemExit
    with status 2 for wrong arguments.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    on_files: dict[str, Callable[[Sequence[str]], int]] = {
        "census": _census,
        "durations": _durations,
        "trace": partial(_from_records, "trace", "a trace for ui.perfetto.dev or chrome://tracing"),
        "report": partial(_from_records, "report", "an HTML page"),
        "summary": partial(_from_records, "summary", "a summary in GitHub's Markdown"),
    }
    if arguments and arguments[0] in on_files:
        return on_files[arguments[0]](arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m pytest_accel",
        description="Show the devices that a session has, who holds them and who uses them (info), look for what is "
        "wrong with the machine and say what to do (doctor), check that each test of a pipeline ran (census), merge "
        "the times of its tests (durations), or make a trace, a page or a summary of records (trace, report, summary).",
        epilog="Environment variables such as PYTEST_ACCEL count as they do for pytest; ini files are not read. "
        "The other commands have other options: census --help.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=_COMMANDS,
        default="info",
        help=f"{', '.join(_COMMANDS)} (default: info)",
    )
    options.add_arguments(parser, (options.ACCEL, options.DEVICES, options.ORDER))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    if given.command in on_files:
        parser.error(f"{given.command} must be the first argument")
    try:
        settings = options.settings_without_pytest(given)
        run = _doctor if given.command == "doctor" else _info
        return run(settings, as_json=given.json)
    except VendorError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except (pytest.UsageError, ValueError) as error:
        parser.error(str(error))


def _info(settings: options.Settings, *, as_json: bool) -> int:
    from pytest_accel.features.doctor import info

    facts = info.look(machine_for(settings))
    print(json.dumps(info.as_json(facts), indent=2) if as_json else info.table(facts))
    return 0


def _doctor(settings: options.Settings, *, as_json: bool) -> int:
    from pytest_accel.features import doctor

    findings = doctor.examine(settings)
    print(json.dumps(doctor.as_json(findings), indent=2) if as_json else doctor.text(findings))
    return 1 if doctor.problems(findings) else 0


def _census(arguments: Sequence[str]) -> int:
    from pytest_accel.features.planning import census_file, job_merge, merge_text

    parser = argparse.ArgumentParser(
        prog="python -m pytest_accel census",
        description="Check that each test ran in at least one job of a pipeline. The exit status is 1 if one did not.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the files that pytest --accel-census has written")
    parser.add_argument(
        "--allow",
        metavar="FILE",
        help="the tests that may run in no job: a node id or a pattern with * and ? on each line; # begins a comment",
    )
    given = parser.parse_args(arguments)
    try:
        jobs = {file: census_file.read(file) for file in given.files}
        allow = [] if given.allow is None else job_merge.parse_allow(_read(given.allow))
    except census_file.CensusError as error:
        parser.error(str(error))
    merged = job_merge.merge(jobs, allow)
    text = merge_text.text(merged, given.allow)
    encoding = sys.stdout.encoding
    print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0 if merged.is_proof else 1


def _from_records(name: str, about: str, arguments: Sequence[str]) -> int:
    """Make a file of records; `name` is both the command and the function of `outputs`."""
    from pytest_accel.features.record import outputs
    from pytest_accel.features.record.record_file import RecordError, read_record
    from pytest_accel.features.record.timeline import sessions_of

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


def _durations(arguments: Sequence[str]) -> int:
    from pathlib import Path

    from pytest_accel.features.order import durations_file

    parser = argparse.ArgumentParser(
        prog="python -m pytest_accel durations",
        description="Add the times of tests in files of pytest --accel-durations to another such file.",
        allow_abbrev=False,
    )
    parser.add_argument("result", type=Path, metavar="RESULT", help="the file to add to; it need not exist")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="the files to add, such as those of jobs")
    given = parser.parse_args(arguments)
    if absent := [str(path) for path in given.files if not path.exists()]:
        parser.error(f"{', '.join(absent)}: no such file")
    try:
        entries = durations_file.merge(durations_file.read(path) for path in (given.result, *given.files))
        durations_file.write(given.result, entries)
    except durations_file.DurationsError as error:
        parser.error(str(error))
    print(f"{given.result}: times of {len(entries)} tests")
    return 0


def _read(path: str) -> str:
    """Return the text of the file of ``--allow``."""
    from pytest_accel.features.planning.census_file import CensusError

    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise CensusError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CensusError(f"{path}: must be UTF-8: {error}") from None


def _run() -> int:
    """Run `main`, and return the exit status. Exit silently if the reader of a pipe closes it (``| head``)."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout at exit and would report the error again, so stdout is redirected.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(_run())
