"""The context of a rank: its identity, its world, its devices and its stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from sys import modules
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.device import Device
from pytest_accel.hardware import shares
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.messages.rank_messages import Announced
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.world_spec import WorldSpec
from pytest_accel.rank.operations import Operations

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from pytest_accel.rank.signed_store import SignedStore


RANK: pytest.StashKey[RankContext] = pytest.StashKey()
"""Key of the context in the stash of a rank's `pytest.Config`."""


class RankContext:
    """State of a rank that fixtures and features use; created once for each rank."""

    def __init__(self, session: SessionSpec, spec: WorldSpec, rank: int) -> None:
        self.session = session
        self.spec = spec
        self.rank = rank
        self.config: pytest.Config
        """The configuration of this rank's pytest session. It does not exist before the session is configured."""
        self.began_with_torch = "torch" in modules
        """False if the rank began without torch, because its test or the session asks for that."""
        self.is_prepared = False
        """True if the rank has been prepared for its first test."""
        self.in_test = False
        """True while the rank runs a test."""
        self.tests = 0
        """Number of tests that this world has begun, for all its drivers. The same number on every rank."""
        self.exchanges: Counter[str] = Counter()
        """Number of calls of each `Gathering` in the running test; a rank that fails may make fewer than the others."""
        self.awaited_exchange: str | None = None
        """The name of the `Gathering` in which this rank waits for others."""
        self.store: Store | None = None
        """The world's store for tests. Any process that reaches its port can write to it."""
        self.lends_store = False
        """True once a test has used the store."""
        self.signed_store: SignedStore | None = None
        """The same store, for values that only ranks of this world can have written."""
        self.default_group: ProcessGroup | None = None
        self.inherited: dict[str, str] = {}
        """The environment that the session has, before pytest-accel sets variables for this rank."""
        self.variables: dict[str, str | None] = {}
        """The environment variables that pytest-accel has set for this rank; None if it has unset the variable."""
        self.operations = Operations(lambda: self.in_call)
        """The operations of torch.distributed that this rank has issued."""
        self.in_call = False
        """True while the rank runs the test's own code for the first time."""
        self.announce: Callable[[Announced], None]
        """Sends the announcements of the running call to the driver (`TestRunner.announce`)."""
        self.keeps_groups = False
        """True if a feature destroys the process groups that tests leave, so that they are no leaks."""
        self.absent: frozenset[str] = frozenset()
        """Modules of the plugins with the role `absent`, which only add their options in a rank."""
        self.vendor = make_vendor(spec.key.kind, spec.kind_argument)

    @property
    def own_devices(self) -> tuple[Device, ...]:
        """The devices of this rank."""
        return self.spec.devices_of(self.rank)

    @property
    def visible_devices(self) -> tuple[Device, ...]:
        """The devices that this process sees."""
        return self.spec.seen_by(self.rank)

    def torch_devices(self) -> list[str]:
        """Return torch's names of the visible devices; ``cpu`` if the world has none."""
        return list(self.vendor.torch_devices(self.visible_devices)) or ["cpu"]

    @property
    def cores(self) -> set[int]:
        """The logical CPUs reserved for this rank; empty if it may use all."""
        return {core for device in self.own_devices for core in device.cores}

    def fraction(self, device: Device) -> float:
        """Return the fraction of the memory of `device` that one rank of this world may use."""
        return shares.fraction(self.spec.share, device) * self.session.fractions.get(device.id, 1.0)

    @cached_property
    def torch_device(self) -> str:
        """torch's name of the first device of this rank; ``cpu`` if the rank has none."""
        return next((name for name, _ in self.torch_names), "cpu")

    @cached_property
    def torch_names(self) -> tuple[tuple[str, Device], ...]:
        """The devices of this rank, each with torch's name of it."""
        names = dict(zip(self.visible_devices, self.torch_devices(), strict=False))
        return tuple((names[device], device) for device in self.own_devices)

    @cached_property
    def accelerators(self) -> tuple[tuple[str, Device], ...]:
        """The same devices without those that are parts of the CPU to torch."""
        return tuple((name, device) for name, device in self.torch_names if not name.startswith("cpu"))

    @property
    def shared_directory(self) -> Path:
        """A folder of the running test, the same in every rank."""
        return Path(self.session.basetemp, f"accel-w{self.spec.world}-shared", str(self.tests))
