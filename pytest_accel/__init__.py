"""A pytest plugin for distributed and accelerator test suites.

`__all__` lists what other packages may import, from here; the modules below are this project's own.

PYTEST_DONT_REWRITE (ranks are forked from a process that has this package imported already).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Device, MaskError, Vendor
    from pytest_accel.core.stash_keys import is_rank
    from pytest_accel.features.faults.announcements import Faults
    from pytest_accel.features.launch.hooks import Launch
    from pytest_accel.features.launch.launched_script import LaunchError, LaunchResult, LaunchTimeout
    from pytest_accel.features.record.record_file import RecordError, read_record
    from pytest_accel.fixtures import Accel, Gather, MakeMesh
    from pytest_accel.hardware.health import HealthVendor
    from pytest_accel.verdict.phase_verdict import (
        LeftBehind,
        RankDied,
        RankError,
        RankHung,
        RanksDisagree,
        RankUnstarted,
    )

__all__ = [
    "Accel",
    "Device",
    "Faults",
    "Gather",
    "HealthVendor",
    "Launch",
    "LaunchError",
    "LaunchResult",
    "LaunchTimeout",
    "LeftBehind",
    "LeftoverWarning",
    "MakeMesh",
    "MaskError",
    "PreloadWarning",
    "RankDied",
    "RankError",
    "RankHung",
    "RankUnstarted",
    "RanksDisagree",
    "RecordError",
    "Vendor",
    "__version__",
    "is_rank",
    "read_record",
]

__version__ = "0.1.0"

_HOMES = {
    "core.device": ("Device", "MaskError", "Vendor"),
    "core.stash_keys": ("is_rank",),
    "fixtures": ("Accel", "Gather", "MakeMesh"),
    "hardware.health": ("HealthVendor",),
    "features.faults.announcements": ("Faults",),
    "features.launch.hooks": ("Launch",),
    "features.launch.launched_script": ("LaunchError", "LaunchResult", "LaunchTimeout"),
    "features.record.record_file": ("RecordError", "read_record"),
    "verdict.phase_verdict": ("LeftBehind", "RankDied", "RankError", "RankHung", "RankUnstarted", "RanksDisagree"),
}
"""The names that are imported when they are first asked for, by module: most sessions need none of them."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LeftoverWarning(pytest.PytestWarning):
    """A test has left something behind in its ranks (``accel_leaks warn``)."""


class PreloadWarning(pytest.PytestWarning):
    """A test file has set a variable that torch had read before, in the process from which ranks are forked."""
