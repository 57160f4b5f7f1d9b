"""What a rank knows of itself and its world."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.device import Device
from pytest_accel.core.messages import SessionSpec, WorldSpec
from pytest_accel.hardware.registry import make_vendor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from pytest_accel.rank.signed_store import SignedStore


RANK: pytest.StashKey[RankContext] = pytest.StashKey()
"""On the config of a rank."""


class RankContext:
    """What fixtures ask for."""

    def __init__(self, session: SessionSpec, spec: WorldSpec, rank: int) -> None:
        self.session = session
        self.spec = spec
        self.rank = rank
        self.tests = 0
        """How many tests this world has begun, whoever drove them: the same number on every rank."""
        self.store: Store | None = None
        """For what tests keep there. Any process that reaches its port can write to it."""
        self.signed_store: SignedStore | None = None
        """The same store, for what only ranks can have written."""
        self.default_group: ProcessGroup | None = None
        self.variables: dict[bytes, bytes | None] = {}
        """The environment that makes this process the rank that it is; None: not set."""
        self.watched = False
        """Whether the rank has a thread that writes down the record of its collectives."""
        self.kept_groups: set[str] = set()
        """Names of the process groups that live as long as the world."""
        self.absent: frozenset[str] = frozenset()
        """Modules of the plugins of which only the options are known here."""
        self.vendor = make_vendor(spec.kind, spec.kind_argument)

    @property
    def own(self) -> tuple[Device, ...]:
        """This rank's own devices."""
        return self.spec.devices_of(self.rank)

    @property
    def seen(self) -> tuple[Device, ...]:
        """The devices that this process sees."""
        return self.spec.seen_by(self.rank)

    def torch_devices(self) -> list[str]:
        """torch's names of the visible devices; ``cpu`` where the world has none."""
        return list(self.vendor.torch_devices(self.seen)) or ["cpu"]

    @property
    def cores(self) -> set[int]:
        """The logical CPUs that are this rank's own; empty where it may use all."""
        return {core for device in self.own for core in device.cores}

    @cached_property
    def torch_device(self) -> str:
        """torch's name of this rank's first own device."""
        return self.torch_name(self.own[0]) if self.own else "cpu"

    def torch_name(self, device: Device) -> str:
        """What torch calls one of the visible devices."""
        return self.torch_devices()[self.seen.index(device)]

    @property
    def shared_directory(self) -> Path:
        """A folder of the running test, the same in every rank."""
        return Path(self.session.basetemp, f"w{self.spec.world}-shared", str(self.tests))
