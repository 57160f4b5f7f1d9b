"""Messages between a driver and the agent of another machine about devices there."""

from __future__ import annotations

from msgspec import Struct

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.settings.options import Settings


class MachineDemand(Struct, frozen=True):
    """The part of a world's demand that one machine serves."""

    number: int
    """Number of the request, and then of the lease: unique for the machine."""
    world: WorldDemand
    need: DeviceNeed | None
    """The devices on this machine; None: none."""
    mask: str | None = None
    """Mask that shows only the devices to lease, as a process without a mask numbers them; None: any devices."""


# Driver to agent


class UseSettings(Struct, frozen=True, tag=True):
    """Lease devices by these settings of the session."""

    settings: Settings


class InventoryRequest(Struct, frozen=True, tag=True):
    """Ask for the inventory of a device kind."""

    kind: str
    settings: Settings
    """The session's settings."""


class RequestLease(Struct, frozen=True, tag=True):
    """Request a lease."""

    demand: MachineDemand


class LeaseReturn(Struct, frozen=True, tag=True):
    """Return a lease, or cancel a request that still waits."""

    number: int
    killed: bool


class LeaseUsers(Struct, frozen=True, tag=True):
    """Tell which processes of the agent's machine use a lease."""

    number: int
    pids: tuple[int, ...]


# Agent to driver


class InventoryReply(Struct, frozen=True, tag=True):
    """The answer to :class:`InventoryRequest`."""

    kind: str
    inventory: Inventory | None
    error: str = ""
    """The reason if there is no inventory."""


class LeaseGranted(Struct, frozen=True, tag=True):
    """The answer to a :class:`RequestLease` whose demand has this number, which is now the lease's."""

    number: int
    devices: tuple[Device, ...]


class LeaseFailed(Struct, frozen=True, tag=True):
    """The other answer to a :class:`RequestLease`: an error."""

    number: int
    text: str
    unfit: bool = False
    """True if the machine's devices do not meet the need, so that another machine may be tried."""


class LeaseWanted(Struct, frozen=True, tag=True):
    """Another request waits for the devices of a lease."""

    number: int


class LeaseLost(Struct, frozen=True, tag=True):
    """The lock of a device of a lease was lost, and another session may have the device."""

    number: int
    why: str
