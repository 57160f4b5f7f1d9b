"""A pytest plugin for distributed and accelerator test suites.

Other packages may import the names in `__all__`, from here; the modules below are this project's own.

PYTEST_DONT_REWRITE (ranks are forked from a process that has this package imported already).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Device as Device
    from pytest_accel.core.device import MaskError as MaskError
    from pytest_accel.core.device import Vendor as Vendor
    from pytest_accel.core.stash_keys import is_rank as is_rank
    from pytest_accel.features.faults.announcements import Faults as Faults
    from pytest_accel.features.launch.hooks import Launch as Launch
    from pytest_accel.features.launch.launched_script import LaunchError as LaunchError
    from pytest_accel.features.launch.launched_script import LaunchResult as LaunchResult
    from pytest_accel.features.launch.launched_script import LaunchTimeout as LaunchTimeout
    from pytest_accel.features.record.record_file import RecordError as RecordError
    from pytest_accel.features.record.record_file import read_record as read_record
    from pytest_accel.fixtures import Accel as Accel
    from pytest_accel.fixtures import Gather as Gather
    from pytest_accel.fixtures import MakeMesh as MakeMesh
    from pytest_accel.hardware.health import HealthVendor as HealthVendor
    from pytest_accel.verdict.phase_verdict import LeftBehind as LeftBehind
    from pytest_accel.verdict.phase_verdict import RankDied as RankDied
    from pytest_accel.verdict.phase_verdict import RankError as RankError
    from pytest_accel.verdict.phase_verdict import RankHung as RankHung
    from pytest_accel.verdict.phase_verdict import RanksDisagree as RanksDisagree
    from pytest_accel.verdict.phase_verdict import RankUnstarted as RankUnstarted

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
__all__ = ["LeftoverWarning", "PreloadWarning", "__version__", *(name for names in _HOMES.values() for name in names)]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LeftoverWarning(pytest.PytestWarning):
    """A test has left something behind in its ranks (``accel_leaks warn``)."""


class PreloadWarning(pytest.PytestWarning):
    """A test file has set a variable that torch had read before, in the process from which ranks are forked."""
