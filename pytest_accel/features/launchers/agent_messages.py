"""Messages between rank 0, the driver, and the other processes of a session under a launcher or on a cluster.

Each request of the driver to an agent is a connection of its own, whose first message names its purpose. A request
keeps what it gets, such as a lease, until the connection ends. So messages need no numbers, and the end of a process no
message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.settings.options import Settings


class Hello(Struct, frozen=True):
    """The greeting of a launched process, or of the agent of a cluster's node: its first message to the driver.

    A process of an MPI job gets a file with the `Serve` for its fork server as the answer.
    """

    rank: int
    """Its rank; for a cluster's node, the number of the machine in the session."""
    pid: int
    facts: Mapping[str, str] = {}
    """The facts that must be the same in all processes, by their names for the user."""
    cores: tuple[int, ...] = ()
    """The CPU cores that the launcher lets this process use; empty if this is not known."""
    host: str = ""
    """The machine's host name."""
    machine: str = ""
    """The result of `machine_identity`; empty on one machine."""
    address: str = ""
    """The address of this machine in its connection to rank 0."""
    driver_address: str = ""
    """The address of rank 0's machine in that connection."""


class End(Struct, frozen=True, tag=True):
    """Exit with `status` once the driver has exited. An agent closes the connection when it has received this."""

    status: int
    driver: int
    """The driver's process id."""


# The first messages of connections to an agent; `RankTarget` and `Inspection` are in `messages/connect.py`


class StartServer(Struct, frozen=True, tag=True):
    """Start a fork server, once the previous server has ended.

    The connection becomes the server's connection to the driver.
    """

    spec: SessionSpec
    cores: tuple[int, ...] = ()
    """The CPU cores that the ranks may use; empty for those that the agent may use."""

    @property
    def token(self) -> str:
        """The path of a file that the driver creates: a machine that finds it shares the driver's file system."""
        return os.path.join(self.spec.basetemp, f"shared-{os.path.basename(self.spec.directory)}")


class WatchServer(Struct, frozen=True, tag=True):
    """Wait for the end of the fork server; the answer is the end of its log."""


class KillServer(Struct, frozen=True, tag=True):
    """Kill the fork server."""


class LeaseRequest(Struct, frozen=True, tag=True):
    """Request a lease on devices of the agent's machine, until the driver closes the connection.

    The answer is a :class:`LeaseReply`.
    """

    settings: Settings
    demand: WorldDemand
    need: DeviceNeed
    """The devices that are needed on this machine."""
    mask: str | None = None
    """Mask that shows only the devices to lease, as a process without a mask numbers them; None for any."""


AgentTarget = StartServer | WatchServer | KillServer | LeaseRequest | End


class LeaseReply(Struct, frozen=True):
    """The answer to a request for a lease."""

    devices: tuple[Device, ...] = ()
    error: str = ""
    """Why the request cannot be met; empty if it is."""
