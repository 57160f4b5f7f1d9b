"""The messages between the controller and its helper process that talks to Ray (`pytest_accel.nodes.ray_process`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_accel.nodes.ray_resources import RayDemand, RayNode

# To the helper


@dataclass(frozen=True, slots=True)
class Connect:
    """The first message: connect to a cluster."""

    address: str
    """``HOST:PORT``, or ``auto`` for the cluster of this machine."""
    namespace: str
    """Namespace of the session's actors, which nobody else uses."""


@dataclass(frozen=True, slots=True)
class RequestPlace:
    """Reserve a place."""

    number: int
    demand: RayDemand


@dataclass(frozen=True, slots=True)
class ReleasePlace:
    """Give back a place, or cancel the request for it."""

    number: int


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start an agent: the answer to :class:`NodeNeeded`."""

    number: int
    invitation: bytes = field(repr=False)
    """The line that the agent reads from standard input; it contains the session's secret."""


@dataclass(frozen=True, slots=True)
class StopAgent:
    """Kill an agent. The next place on its node needs a new one."""

    number: int


# To the controller


@dataclass(frozen=True, slots=True)
class Connected:
    """The helper is connected to a cluster, which has these nodes."""

    nodes: tuple[RayNode, ...]
    can_scale: bool
    """True if an autoscaler can add nodes."""


@dataclass(frozen=True, slots=True)
class HelperFailed:
    """The helper exits, since it cannot connect to the cluster, or after an error."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node has joined the cluster."""

    node: RayNode


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node has left the cluster, or died."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeNeeded:
    """A place is being prepared on a node that has no agent."""

    node: str
    number: int
    """The number of the agent that is to be started, and of the node in the session: 1, 2, ..."""


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """An agent has ended, or could not be started."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReservedBundle:
    """The part of a place that is on one node."""

    node: str
    ranks: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlaceReserved:
    """A request has got its place."""

    number: int
    bundles: tuple[ReservedBundle, ...]


@dataclass(frozen=True, slots=True)
class PlaceWaits:
    """A request has to wait."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class PlaceFailed:
    """A request cannot be met."""

    number: int
    reason: str
