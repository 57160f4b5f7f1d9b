"""The messages between the controller and `ray_process`, its helper process that talks to Ray."""

from __future__ import annotations

from msgspec import Struct

from pytest_accel.features.ray.ray_resources import RayDemand, RayNode

# To the helper


class Connect(Struct, frozen=True):
    """The first message: connect to a cluster."""

    address: str
    """``HOST:PORT``, or ``auto`` for the cluster of this machine."""
    namespace: str
    """Namespace of the session's actors, not used by any other session."""


class RequestPlace(Struct, frozen=True, tag=True):
    """Reserve a place."""

    request_id: int
    demand: RayDemand


class ReleasePlace(Struct, frozen=True, tag=True):
    """Give back a place, or cancel the request for it."""

    request_id: int


class StartAgent(Struct, frozen=True, tag=True):
    """Start an agent: the answer to :class:`NodeNeeded`."""

    number: int
    invitation: bytes
    """The line that the agent reads from standard input; it contains the session's secret."""

    # Tracebacks, also those of rich, must not show the secret.

    def __repr__(self) -> str:
        return f"StartAgent({self.number})"

    def __rich_repr__(self) -> list[tuple[str, int]]:
        return [("number", self.number)]


class StopAgent(Struct, frozen=True, tag=True):
    """Kill an agent. The next place on its node needs a new one."""

    number: int


ToHelper = RequestPlace | ReleasePlace | StartAgent | StopAgent


# To the controller


class Connected(Struct, frozen=True, tag=True):
    """The helper is connected to a cluster, which has these nodes."""

    nodes: tuple[RayNode, ...]
    can_scale: bool
    """True if an autoscaler can add nodes."""


class HelperFailed(Struct, frozen=True, tag=True):
    """The helper exits, since it cannot connect to the cluster, or after an error."""

    reason: str


class NodeJoined(Struct, frozen=True, tag=True):
    """A node has joined the cluster."""

    node: RayNode


class NodeLost(Struct, frozen=True, tag=True):
    """A node has left the cluster, or died."""

    node: str
    """Ray's id of the node."""


class NodeNeeded(Struct, frozen=True, tag=True):
    """A place is being prepared on a node that has no agent."""

    node: str
    """Ray's id of the node."""
    number: int
    """The number of the agent that is to be started, and of the node in the session: 1, 2, ..."""


class AgentEnded(Struct, frozen=True, tag=True):
    """An agent has ended, or could not be started."""

    number: int
    reason: str


class ReservedBundle(Struct, frozen=True, tag=True):
    """The part of a place that is on one node."""

    node: str
    """Ray's id of the node."""
    ranks: int
    """Number of ranks."""
    devices: tuple[str, ...]
    """The devices, as in `Place.devices`."""


class PlaceReserved(Struct, frozen=True, tag=True):
    """The place of a request has been reserved."""

    request_id: int
    bundles: tuple[ReservedBundle, ...]


class PlaceWaits(Struct, frozen=True, tag=True):
    """A request has to wait."""

    request_id: int
    reason: str


class PlaceFailed(Struct, frozen=True, tag=True):
    """A request cannot be met."""

    request_id: int
    reason: str


ToController = (
    Connected
    | HelperFailed
    | NodeJoined
    | NodeLost
    | NodeNeeded
    | AgentEnded
    | PlaceReserved
    | PlaceWaits
    | PlaceFailed
)
