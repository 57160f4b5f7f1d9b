"""``python -m pytest_accel doctor``: what is wrong with the machine for tests on accelerators, and what to do.

The facts are gathered at the edge (`gather`, `forks`), frozen (`facts`), and judged by pure functions (`checks`).
"""

from __future__ import annotations

from pytest_accel.commands.doctor.checks import Finding, check
from pytest_accel.commands.doctor.gather import gather
from pytest_accel.commands.doctor.show import as_json, problems, text
from pytest_accel.settings.options import Settings

__all__ = ["Finding", "as_json", "check", "examine", "problems", "text"]


def examine(settings: Settings) -> tuple[Finding, ...]:
    """Look at the machine as a session with `settings` would, and judge.

    ValueError where a setting does not fit the machine.
    """
    return check(gather(settings))
