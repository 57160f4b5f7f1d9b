"""The demand for a world, which goes unchanged from a test's plan to the broker, and the Protocol of what serves it.

A stage that knows more holds the demand of the stage before it: the pool's request holds a :class:`WorldDemand`, each
:class:`MachineDemand` too, and so does the broker's queue. No stage copies fields. So an argument of a mark that
concerns the wait for devices is a field of `WorldDemand`, and reaches the broker without a change in between.
An argument that changes the order of requests also concerns `RequestQueue` and `Pool._pass_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.units import count_text
from pytest_accel.core.world_key import WorldKey
from pytest_accel.hardware.matching import in_words
from pytest_accel.leases.holder import Holder


@dataclass(frozen=True, slots=True)
class WorldDemand:
    """A test's demand for a world. The driver makes it once, from the test's plan."""

    key: WorldKey
    holder: Holder
    """The driver that waits for the world, with its test."""


@dataclass(frozen=True, slots=True)
class MachineDemand:
    """The part of a world's demand that one machine serves."""

    number: int
    """Number of the request, and then of the lease: unique in the session, and the same at all machines."""
    world: WorldDemand
    need: DeviceNeed | None
    """The devices; None: CPU slots, one for each rank."""
    mask: str | None = None
    """Mask that shows only the devices to lease, as a process without a mask numbers them; None: any devices."""

    @property
    def kind(self) -> str | None:
        """The kind of the devices; None for CPU slots."""
        return None if self.need is None else self.world.key.kind

    def in_words(self, slots: int) -> str:
        """Return what is demanded, for messages; `slots` is the number of CPU slots of the machine."""
        if self.need is None:
            return count_text(min(self.world.key.ranks, slots), "CPU slot")
        return in_words(self.need, self.world.key.kind)


class LeaseSource(Protocol):
    """The devices and CPU slots of one machine, as the pool leases them. No method waits for a lease."""

    @property
    def name(self) -> str:
        """Name of the machine for messages; empty: the controller's own."""

    @property
    def slots(self) -> int:
        """Number of CPU slots."""

    def submit(self, demand: MachineDemand, answer: Callable[[tuple[Device, ...] | Exception], None]) -> None:
        """Request a lease.

        `answer` gets its devices, none for CPU slots, or the error that has ended the request: before this method
        returns, if that is possible, or later in any thread.
        """

    def cancel(self, number: int) -> bool:
        """Cancel a request; return False if it is known not to wait any more."""

    def obstacles(self, number: int) -> list[str] | None:
        """Return a line for each known reason why a request waits; None if it does not wait any more."""

    def unavailable(self, demand: MachineDemand) -> str | None:
        """Return why `demand` can never be met any more in this session, or None."""

    def pass_on(self, lease: int, request: int | None) -> bool:
        """Transfer a lease to a request, without an answer to it, if it is the next that would get what is leased.

        Return True if done. The lease keeps its number, and the request is gone. If `request` is None, keep the lease
        if nobody waits for it.
        """

    def describe(self, number: int, *, pids: Sequence[int] | None = None, test: str | None = None) -> None:
        """Tell other sessions which processes, or which test, use a lease."""

    def give_back(self, number: int, *, killed: bool) -> None:
        """Return a lease that no process uses any more; `killed` if the processes that used it were killed."""


class RemoteDevicesError(Exception):
    """The devices of another machine are not available; the message says why."""


class UnfitDevicesError(RemoteDevicesError):
    """The devices that a cluster has reserved on a machine do not meet the need."""


class LostMachineError(RemoteDevicesError):
    """The connection to the machine or its agent is lost."""
