"""Messages between the driver and the agents of a session under a launcher or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.hardware.inventory import Inventory
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.settings.options import Settings


class Hello(Struct, frozen=True):
    """The greeting of a launched process, its first message to rank 0. It has no answer."""

    rank: int
    pid: int
    args: tuple[str, ...]
    """The arguments of the command line."""
    directory: str
    """The working directory at the start."""
    rootdir: str
    masks: Mapping[str, str]
    """The mask variables of this process that are set: they limit which devices it sees."""
    host: str = ""
    """The machine's host name."""
    machine: str = ""
    """The result of `machine_identity`, equal for processes that can pass each other files and signals."""
    address: str = ""
    """The address of this machine in its connection to rank 0; empty on rank 0's machine."""
    driver_address: str = ""
    """The address of rank 0's machine in that connection."""
    link: str = ""
    """The name of the connection in rank 0's link; empty on rank 0's machine."""


# Agent to driver


class ServerEnded(Struct, frozen=True, tag=True):
    """The fork server has exited, or could not be started."""

    log: str = ""
    """The end of the server's log, or the traceback of the failed start; empty if the driver can read the log."""


class Reply(Struct, frozen=True, tag=True):
    """The answer to the request `number`."""

    number: int
    inventory: Inventory | None = None
    devices: tuple[Device, ...] = ()
    error: str = ""
    """Why the request cannot be met; empty if it is."""
    unfit: bool = False
    """True if the machine's devices do not meet the need, so that another machine may be tried."""


class LeaseWanted(Struct, frozen=True, tag=True):
    """Another session waits for the devices of a lease."""

    number: int


class Ending(Struct, frozen=True, tag=True):
    """The agent has received :class:`End`, and waits for the driver's exit."""


class MachineLost(Struct, frozen=True, tag=True):
    """The last message if the machine does not answer any more; the driver's end of the link makes it."""

    why: str


ToDriver = ServerEnded | Reply | LeaseWanted | Ending | MachineLost


# Driver to agent


class StartServer(Struct, frozen=True, tag=True):
    """Start a fork server, once the one before has ended.

    On the driver's machine, the descriptor of the server's end of its connection to the driver follows. From another
    machine, this is the first message of the stream that is this connection.
    """

    spec: SessionSpec
    environment: Mapping[str, str | None]
    """The environment variables that the driver's plugins and conftests have changed; None for a removed one."""
    token: str = ""
    """The path of a file that the driver has created: a machine that finds it shares the driver's file system."""


class KillServer(Struct, frozen=True, tag=True):
    """Kill the fork server."""


class InventoryRequest(Struct, frozen=True, tag=True):
    """Ask for the inventory of a device kind."""

    number: int
    kind: str
    settings: Settings


class LeaseRequest(Struct, frozen=True, tag=True):
    """Request a lease on devices of the agent's machine."""

    number: int
    """The number of the request, and then of the lease."""
    settings: Settings
    demand: WorldDemand
    need: DeviceNeed
    """The devices on this machine."""
    mask: str | None = None
    """Mask that shows only the devices to lease, as a process without a mask numbers them; None: any devices."""


class ReturnLease(Struct, frozen=True, tag=True):
    """Return a lease, or cancel a request that still waits."""

    number: int
    killed: bool


class End(Struct, frozen=True, tag=True):
    """Exit with `status` once the driver has exited."""

    status: int
    driver: int
    """The driver's process id."""


ToAgent = StartServer | KillServer | InventoryRequest | LeaseRequest | ReturnLease | End
