"""A pytest plugin for distributed and accelerator test suites.

`__all__` lists what other packages may import, from here; the modules below are this project's own.

PYTEST_DONT_REWRITE (ranks are forked from a process that has this package imported already).
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_accel.core.device import Device, MaskError, Vendor
    from pytest_accel.core.stash_keys import is_rank
    from pytest_accel.features.faults.announcements import Faults
    from pytest_accel.features.launch.launch_api import Launch
    from pytest_accel.features.launch.launch_result import LaunchError, LaunchResult, LaunchTimeout, NoOutput
    from pytest_accel.features.record.record_file import RecordError, read_record
    from pytest_accel.fixtures import Accel, Gather, MakeMesh
    from pytest_accel.hardware.health import HealthVendor
    from pytest_accel.verdict.remote_exceptions import (
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
    "NoOutput",
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
    "features.launch.launch_api": ("Launch",),
    "features.launch.launch_result": ("LaunchError", "LaunchResult", "LaunchTimeout", "NoOutput"),
    "features.record.record_file": ("RecordError", "read_record"),
    "verdict.remote_exceptions": ("LeftBehind", "RankDied", "RankError", "RankHung", "RankUnstarted", "RanksDisagree"),
}
"""The names that are imported when they are first asked for, by module: most sessions need none of them."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _PlainFinder:
    """Has this package's modules loaded from their bytecode.

    pytest would rewrite the asserts of each, as it does for all plugins, and do so again in every session where no
    bytecode may be written. PYTEST_DONT_REWRITE prevents the rewriting, but pytest would still compile the module in
    each session.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of this package; None for all others."""
        return PathFinder.find_spec(name, path) if name.startswith(f"{__name__}.") else None


sys.meta_path.insert(0, _PlainFinder)


@atexit.register
def _remove_finder() -> None:
    """Remove the finder before the interpreter shuts down.

    Otherwise this module's globals, which include pytest, are freed late, which takes 4 ms.
    """
    if _PlainFinder in sys.meta_path:  # pytester puts sys.meta_path back after a session in its own process.
        sys.meta_path.remove(_PlainFinder)


class LeftoverWarning(pytest.PytestWarning):
    """A test has left something behind in its ranks (``accel_leaks warn``)."""


class PreloadWarning(pytest.PytestWarning):
    """A test file has set a variable that torch had read before, in the process from which ranks are forked."""
