"""``python -m pytest_accel``: commands that need no pytest session."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import pytest

from pytest_accel import features
from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings import options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status.

    It is 1 if the doctor finds a problem, a vendor is broken, or a test ran in no job of a pipeline. Raise SystemExit
    with status 2 for wrong arguments.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = features.commands()
    about_machine = [name for name, on_files in commands.items() if not on_files]
    if arguments and commands.get(arguments[0], False):
        return int(features.command(arguments[0])(arguments[1:]))
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
        choices=tuple(commands),
        default="info",
        help=f"{', '.join(commands)} (default: info)",
    )
    options.add_arguments(parser, (options.ACCEL, options.IDS, options.ORDER))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    if given.command not in about_machine:
        parser.error(f"{given.command} must be the first argument")
    try:
        settings = options.settings_without_pytest(given)
        return int(features.command(given.command)(settings, as_json=given.json))
    except VendorError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except (pytest.UsageError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Exit silently if the reader of a pipe closes it (``| head``).
    sys.exit(main())
