"""The option ``--accel-plan``."""

from __future__ import annotations

import argparse

import pytest

from pytest_accel.hardware.registry import ALL_KINDS, name_kinds

PLAN = "accel_plan"


def add_options(parser: pytest.Parser) -> None:
    """Add the option to `parser`."""
    parser.getgroup("accel").addoption(
        "--accel-plan",
        dest=PLAN,
        nargs="?",
        type=_machine,
        const=True,
        default=None,
        metavar="NxKIND",
        help="show how long the tests would take on this machine, or on one with N devices of KIND (8xcuda), and with "
        "how many workers, then stop",
    )


def asked(config: pytest.Config) -> bool:
    """Whether the session is to show a plan."""
    return config.getoption(PLAN) is not None


def pretended(config: pytest.Config) -> tuple[int, str] | None:
    """The machine that the plan is for, a number of devices and their kind; None: this one, or there is no plan."""
    value = config.getoption(PLAN, None)
    return value if isinstance(value, tuple) else None


def _machine(text: str) -> tuple[int, str]:
    from pytest_accel.hardware.hypothetical_machine import MOST, parse_machine

    try:
        return parse_machine(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be nothing (this machine), or NxKIND such as 8xcuda, with N an int from 1 to {MOST} and KIND one of "
            f"{name_kinds(ALL_KINDS)}, got {text!r} (a path goes before the option)"
        ) from None
