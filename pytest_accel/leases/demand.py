"""The demand for a world, which goes unchanged from a test's plan to the leases."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.holder import Holder


@dataclass(frozen=True, slots=True)
class WorldDemand:
    """A test's demand for a world. The driver makes it once, from the test's plan."""

    key: WorldKey
    holder: Holder
    """The driver that waits for the world, with its test."""
