"""The leases that a test takes for itself."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_accel.core.world_key import WorldKey


class DriverLeases(NamedTuple):
    """The leases that a test takes for itself, in its driver: before its phases, and before its world if it has one."""

    keys: tuple[WorldKey, ...]
    """The key of each lease. All tests of all sessions have one order of leases: this prevents deadlocks."""
    missing: str | None = None
    """Reason to skip the test, because this session can never run it; None if it can run."""
    marks: tuple[pytest.Mark, ...] = ()
    """The marks of the test that say so."""
