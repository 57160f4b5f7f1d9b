"""The messages between the controller and `ray_process`, its helper process that talks to Ray, and of the agents."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.ray.ray_resources import RayNode

# To the agent of a node


class Invitation(Struct, frozen=True, tag=True):
    """The data that an agent needs to join the session. Any process that knows it can join instead of the agent.

    The controller sends it to the helper once, which passes it on with the number of each machine.
    """

    addresses: tuple[str, ...]
    """The addresses at which the controller may be reached."""
    port: int
    key: str
    """The key of the controller's end of the connections, in hexadecimal digits."""
    machine: int = 0
    """The number of the agent's machine in the session."""


# To both


class AgentEnded(Struct, frozen=True, tag=True):
    """An agent has ended, could not be started or may not join. The next place on its node needs a new agent."""

    machine: int
    reason: str


# To the helper


class RequestPlace(Struct, frozen=True, tag=True):
    """Reserve a place for a world, and start the agents there."""

    request_id: int
    key: WorldKey


class ReleasePlace(Struct, frozen=True, tag=True):
    """Give back a place, or cancel the request for it."""

    request_id: int


ToHelper = Invitation | RequestPlace | ReleasePlace | AgentEnded


# To the controller


class Connected(Struct, frozen=True):
    """The helper is connected to a cluster, or exits."""

    nodes: tuple[RayNode, ...] = ()
    can_scale: bool = False
    """True if an autoscaler can add nodes."""
    error: str = ""
    """Why the helper cannot connect; empty if it is connected."""


class AgentStarted(Struct, frozen=True, tag=True):
    """An agent is started on a node, which becomes the next machine of the session.

    The numbers of the machines are 1, 2, ... in the order of these messages.
    """

    name: str
    address: str


class PlaceReserved(Struct, frozen=True, tag=True):
    """The place of a request is reserved, and the agents of its machines have been started."""

    request_id: int
    machines: tuple[int, ...]
    """The number of each rank's machine, and so of its server, in ascending order."""
    devices: Mapping[int, tuple[str, ...]]
    """By machine: the values of the kind's mask variable for the reserved devices, as a process without that mask
    numbers them (``0``, ``3``, ``GPU-...``). Empty for a world without devices."""


class PlaceWaits(Struct, frozen=True, tag=True):
    """A request has to wait."""

    request_id: int
    reason: str


class PlaceFailed(Struct, frozen=True, tag=True):
    """A request cannot be met."""

    request_id: int
    reason: str
    is_lost: bool
    """True if a node was lost meanwhile, so that another request may succeed."""


ToController = AgentStarted | AgentEnded | PlaceReserved | PlaceWaits | PlaceFailed
