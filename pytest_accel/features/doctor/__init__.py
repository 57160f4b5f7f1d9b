"""``python -m pytest_accel doctor``: finds problems of the machine for tests on accelerators, and says what to do.

`gather` and `forks` collect the facts (`facts`), and pure functions judge them (`checks`).
"""

from __future__ import annotations

from pytest_accel.features.doctor.checks import Finding, check
from pytest_accel.features.doctor.gather import gather
from pytest_accel.features.doctor.show import as_json, problems, text
from pytest_accel.settings.options import Settings

__all__ = ["Finding", "as_json", "check", "examine", "problems", "text"]


def examine(settings: Settings) -> tuple[Finding, ...]:
    """Inspect the machine as a session with `settings` would see it, and return the findings.

    Raise ValueError if a setting does not fit the machine.
    """
    return check(gather(settings))
