"""The needs of a test, in the words of ``--accel-select`` and of the files about tests, and its own leases."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pytest_accel.core.world_key import WorldKey


class Needs(NamedTuple):
    """The needs of one test in this session. The defaults hold for a test without marks."""

    marked: bool = False
    """True if the test has the mark ``devices`` or ``distributed``."""
    fits: bool = True
    """True if this machine has all that the test needs."""
    devices: int = 0
    """Number of accelerators that all ranks of the test use together; a shared device counts for each rank."""
    world_size: int = 1
    """Number of processes that run the test; 1 for a rank of a fake process group."""
    nodes: int = 1
    """Minimum number of machines."""
    ranks_per_node: int = 1
    """Number of ranks on the machine with the most of them, if they are on `nodes` machines."""
    kind: str = "none"
    """Kind of the devices; ``cpu`` for ranks without accelerators; ``none`` for a test that names no kind, in a session
    without devices, and for a test without marks."""
    memory: int = 0
    """Bytes that each device must have; 0 if the marks do not say."""
    backend: tuple[str, ...] = ()
    """Names of the backends of the default process group; none if the plugin does not create the group."""
    share: float = 1.0
    """Fraction of each device that the test takes; 1.0 for whole devices."""


class DriverLeases(NamedTuple):
    """The leases that a test takes for itself, in its driver: before its phases, and before its world, if any."""

    keys: tuple[WorldKey, ...]
    """The key of each lease. All tests of all sessions have one order of leases: this prevents deadlocks."""
    missing: str | None = None
    """Reason to skip the test, because this session can never run it; None if it can run."""
    marks: tuple[pytest.Mark, ...] = ()
    """The marks of the test that say so."""
