"""The demand for a world, which goes unchanged from a test's driver to the leases."""

from __future__ import annotations

from msgspec import Struct

from pytest_accel.core.world_key import WorldKey
from pytest_accel.leases.holder import Holder


class WorldDemand(Struct, frozen=True, tag=True):
    """A test's demand for a world, or for a lease without one. The driver makes it once, and sends it to the pool.

    An `Answer` with the same `number` follows, unless the demand is cancelled.
    """

    key: WorldKey
    holder: Holder
    """The driver that waits for the world, with its test."""
    number: int = 0
    """The driver's number for the demand."""
    timeout: float | None = None
    """Maximum seconds to wait for devices or CPU slots, or None for no limit."""
