"""``python -m pytest_accel``: show the devices, or diagnose the machine, without a pytest session."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

import pytest

from pytest_accel.hardware.registry import VendorError
from pytest_accel.settings import options
from pytest_accel.settings.machine import machine_for

_COMMANDS = ("info", "doctor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 1 if the doctor finds a problem or a vendor is broken.

    Raise SystemExit with status 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pytest_accel",
        description="Show the devices that a session has, who holds them and who uses them (info), or look for what is "
        "wrong with the machine and say what to do (doctor).",
        epilog="Environment variables such as PYTEST_ACCEL count as they do for pytest; ini files are not read.",
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=_COMMANDS, default="info", help="info (default) or doctor")
    options.add_arguments(parser, (options.ACCEL, options.DEVICES, options.ORDER))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
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
    from pytest_accel.commands import info

    facts = info.look(machine_for(settings))
    print(json.dumps(info.as_json(facts), indent=2) if as_json else info.table(facts))
    return 0


def _doctor(settings: options.Settings, *, as_json: bool) -> int:
    from pytest_accel.commands import doctor

    findings = doctor.examine(settings)
    print(json.dumps(doctor.as_json(findings), indent=2) if as_json else doctor.text(findings))
    return 1 if doctor.problems(findings) else 0


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
