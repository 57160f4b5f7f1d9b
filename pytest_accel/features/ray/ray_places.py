"""The places of a session in a Ray cluster: their placement groups, and the actors of the nodes that they use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import accelerators
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pytest_accel import __version__
from pytest_accel.core.clock import monotonic
from pytest_accel.features.ray.ray_actors import NodeActor
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    NodeJoined,
    NodeLost,
    NodeNeeded,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReservedBundle,
)
from pytest_accel.features.ray.ray_resources import NODE_LABEL, TYPE_LABEL, Bundles, RayDemand, RayNode, choose_bundles

_MODELS = frozenset(value for name, value in vars(accelerators).items() if name.isupper() and isinstance(value, str))
"""The models of accelerators that Ray knows."""
_UNREPORTED_WAIT = 0.2
"""Seconds that a request may wait before this is reported."""
_LOOK_INTERVAL = 0.5
"""Seconds between two checks of the cluster's nodes, and of the reason why a request waits."""
_USUAL_TIME = 0.05
"""Seconds in which Ray creates a group if there is room. If a request waits longer, kept places are given up."""
_KEEP_TIME = 30.0
"""Seconds that a place without a world is kept, since a world with equal bundles may follow."""
_SETTLE_TIME = 0.12
"""Seconds until the cluster's head knows of released resources (it is told each 0.1 s). A group that is requested
earlier may fail to be placed, and Ray tries again only after 0.7 s."""
_NAMING_TIMEOUT = 120.0
"""Seconds in which the nodes of a place must name its devices: Ray may have to start two processes on each."""
_EXIT_TIMEOUT = 5.0
"""Seconds in which the agents must exit when the session ends, before they are killed."""
_BUSY_INTERVAL = 0.004
"""Seconds between two checks of a request that is about to be met."""


@dataclass(slots=True, eq=False)
class _UsedNode:
    """A node that the session uses."""

    number: int
    """The number of its agent."""
    actor: Any
    agent: Any = None
    """The reference to the agent's result (`NodeActor.run_agent`), once it is started."""


@dataclass(slots=True, eq=False)
class _Reservation:
    """A place: its group is pending, then created (`nodes`), and then its devices are known (`reserved`)."""

    bundles: Bundles
    group: Any
    nodes: tuple[str, ...] = ()
    """The node of each bundle, once the group is created."""
    answers: list[Any] = field(default_factory=list)
    """A reference to the ids of the devices of each bundle, once the group is created."""
    reserved: tuple[ReservedBundle, ...] = ()


@dataclass(slots=True, eq=False)
class _Request:
    """A request that waits for its place."""

    demand: RayDemand
    bundles: Bundles
    began: float
    looked: float
    """The time when the reason to wait was last checked."""
    place: _Reservation | None = None
    """The place that is being reserved; None while the request waits until released resources are known."""
    reason: str = ""
    """The reason to wait that was reported last."""
    placed: float = 0.0
    """The time when the group was created."""
    retried: bool = False
    """True if an earlier attempt failed: a node was lost, or Ray could not name the devices."""

    @property
    def is_placed(self) -> bool:
        """True if the group is created."""
        return self.place is not None and bool(self.place.nodes)


class Places:
    """The places of a session, and the actors on their nodes; makes progress in :meth:`poll`.

    A request waits, then holds its place until it is released. The place is then kept for a while, for another request.
    """

    def __init__(self, send: Callable[[object], None], can_scale: Callable[[], bool]) -> None:
        """`send` sends a message to the controller. `can_scale` returns whether an autoscaler can add nodes."""
        self._send = send
        self._can_scale = can_scale
        self._cluster_nodes = _alive_nodes()
        self._looked = monotonic()
        self._used: dict[str, _UsedNode] = {}
        self._last_agent = 0
        """The number of the last agent."""
        self._waiting: dict[int, _Request] = {}
        self._held: dict[int, _Reservation] = {}
        self._kept: dict[_Reservation, float] = {}
        """The kept places, each with the time when it is given up."""
        self._settled = 0.0
        """The time from which on the cluster's head knows of all resources that were released."""

    @property
    def nodes(self) -> tuple[RayNode, ...]:
        """The nodes of the cluster."""
        return tuple(self._cluster_nodes.values())

    @property
    def poll_interval(self) -> float:
        """Seconds until the next call of :meth:`poll` is due."""
        now = monotonic()
        if any(request.is_placed or now - request.began < _LOOK_INTERVAL for request in self._waiting.values()):
            return _BUSY_INTERVAL
        return _LOOK_INTERVAL / 10 if self._waiting else _LOOK_INTERVAL

    def request(self, request_id: int, demand: RayDemand, *, retried: bool = False) -> None:
        """Reserve a place; a message answers the request. With `retried`, it fails if Ray fails once more."""
        bundles = choose_bundles(demand, self.nodes, _MODELS)
        for place in self._kept:
            if place.bundles == bundles:
                del self._kept[place]
                self._hold(request_id, place)
                return
        if not bundles.fits(self.nodes):
            reason = bundles.shortage(self.nodes)
            if bundles.avoided:  # An autoscaler might add one unfit node after the other.
                self._send(PlaceFailed(request_id, reason))
                return
            if not self._can_scale():
                self._send(PlaceFailed(request_id, f"{reason}, and no autoscaler adds nodes"))
                return
        now = monotonic()
        self._waiting[request_id] = _Request(demand, bundles, now, now - _LOOK_INTERVAL, retried=retried)

    def release(self, request_id: int) -> None:
        """Give a place back, or cancel the request for it; no-op if it has failed."""
        if request_id in self._waiting:
            self._drop(self._waiting.pop(request_id))
        elif request_id in self._held:
            place = self._held.pop(request_id)
            if self._knows(place.nodes):
                self._kept[place] = monotonic() + _KEEP_TIME
            else:
                self._remove(place)

    def start_agent(self, number: int, invitation: bytes) -> None:
        """Start an agent; report that it has ended if its node is not used any more."""
        name = self._name_of(number)
        if name is None:
            self._send(AgentEnded(number, "has not been started, since its node is lost"))
        else:
            self._used[name].agent = self._used[name].actor.run_agent.remote(invitation)

    def stop_agent(self, number: int) -> None:
        """Kill an agent; no-op if it has ended."""
        name = self._name_of(number)
        if name is not None:
            ray.kill(self._used.pop(name).actor)

    def _name_of(self, number: int) -> str | None:
        """Return the node of an agent; None if the agent has ended."""
        return next((name for name, node in self._used.items() if node.number == number), None)

    def close(self) -> None:
        """Give everything back to Ray."""
        for request in self._waiting.values():
            self._drop(request)
        for place in (*self._held.values(), *self._kept):
            self._remove(place)
        # The controller has told the agents to exit. An agent that dies with its actor leaves its folder behind.
        if agents := [node.agent for node in self._used.values() if node.agent is not None]:
            ray.wait(agents, num_returns=len(agents), timeout=_EXIT_TIMEOUT)
        for node in self._used.values():
            ray.kill(node.actor)

    def poll(self) -> None:
        """Handle all changes in the cluster since the last call."""
        if monotonic() - self._looked > _LOOK_INTERVAL:
            self._look_at_cluster()
        for name, node in list(self._used.items()):
            if node.agent is not None and _is_ready(node.agent):
                self._agent_ended(name, node)
        for request_id, request in list(self._waiting.items()):
            self._poll_request(request_id, request)
        now = monotonic()
        self._give_up([place for place, expiry in self._kept.items() if expiry < now])
        blocked = [one for one in self._waiting.values() if not one.is_placed and now - one.began > _USUAL_TIME]
        if blocked and self._kept:
            self._give_up(list(self._kept))
            # Their groups are requested again once the head knows of the released resources (`_SETTLE_TIME`).
            for request in blocked:
                self._drop(request)

    def _look_at_cluster(self) -> None:
        """Update the nodes of the cluster, and report which have joined and which are lost."""
        self._looked = monotonic()
        before, self._cluster_nodes = self._cluster_nodes, _alive_nodes()
        for name in self._cluster_nodes.keys() - before.keys():
            self._send(NodeJoined(self._cluster_nodes[name]))
        for name in before.keys() - self._cluster_nodes.keys():
            self._used.pop(name, None)
            # A place that is held keeps its other nodes until it is released: ranks still run there.
            self._give_up([place for place in self._kept if name in place.nodes])
            self._send(NodeLost(name))

    def _poll_request(self, request_id: int, request: _Request) -> None:
        """Advance a waiting request: reserve its group, wait for that, and then for the names of the devices."""
        if request.place is None:
            if monotonic() < self._settled:
                return
            request.place = self._reserve(request.bundles)
        place = request.place
        if not place.nodes:
            table = placement_group_table(place.group)
            if table["state"] != "CREATED":
                self._report_wait(request_id, request)
                return
            place.nodes = tuple(table["bundles_to_node_id"][index] for index in range(len(place.bundles.ranks)))
            if not self._knows(place.nodes):
                self._look_at_cluster()  # A node has just joined.
            if not self._knows(place.nodes):
                self._request_again(request_id, request)
                return
            request.placed = monotonic()
            self._ask_for_devices(place)
        if not self._knows(place.nodes):  # A node is lost, so the answers of the others are useless.
            self._request_again(request_id, request)
            return
        if not all(map(_is_ready, place.answers)):
            if monotonic() - request.placed > _NAMING_TIMEOUT:
                self._fail(
                    request_id, request, f"Ray has not named the devices of a place within {_NAMING_TIMEOUT:g} s"
                )
            return
        try:
            devices = [tuple(sorted(ids, key=lambda one: (len(one), one))) for ids in ray.get(place.answers)]
        except ray.exceptions.RayError as error:
            self._look_at_cluster()
            if self._knows(place.nodes) and request.retried:
                self._fail(request_id, request, f"Ray cannot name the devices of a place: {error}")
            else:  # Ray reports the end of an actor before that of its node.
                self._request_again(request_id, request)
            return
        bundles = zip(place.nodes, place.bundles.ranks, devices, strict=True)
        place.reserved = tuple(ReservedBundle(*bundle) for bundle in bundles)
        del self._waiting[request_id]
        self._hold(request_id, place)

    def _knows(self, nodes: tuple[str, ...]) -> bool:
        return all(name in self._cluster_nodes for name in nodes)

    def _request_again(self, request_id: int, request: _Request) -> None:
        """Give back what is reserved for a request, and reserve another place."""
        self._drop(request)
        del self._waiting[request_id]
        self.request(request_id, request.demand, retried=True)

    def _fail(self, request_id: int, request: _Request, reason: str) -> None:
        self._drop(request)
        del self._waiting[request_id]
        self._send(PlaceFailed(request_id, reason))

    def _hold(self, request_id: int, place: _Reservation) -> None:
        """Give a reserved place to a request, and report it."""
        self._held[request_id] = place
        for name in place.nodes:
            self._use(name)  # The agent of a kept place's node may have ended.
        self._send(PlaceReserved(request_id, place.reserved))

    def _report_wait(self, request_id: int, request: _Request) -> None:
        """Report why a request waits, if the reason is new; request again if other bundles are now better.

        No-op for a short wait, and if the reason was checked recently.
        """
        now = monotonic()
        if now - request.began < _UNREPORTED_WAIT or now - request.looked < _LOOK_INTERVAL:
            return
        request.looked = now
        bundles = request.bundles
        if choose_bundles(request.demand, self.nodes, _MODELS) != bundles:  # Nodes have joined or are lost.
            self._drop(request)
            del self._waiting[request_id]
            self.request(request_id, request.demand, retried=request.retried)
            return
        if bundles.fits(self.nodes):
            total = sum(node.resources[bundles.resource] for node in bundles.usable(self.nodes))
            state = f"its nodes have {total:g}"
            if not bundles.models and not bundles.avoided:  # Ray tells only what is free in the whole cluster.
                free = ray.available_resources().get(bundles.resource, 0)
                state = f"{free:g} of {total:g} are free"
        else:
            state = "none of its nodes is large enough; its autoscaler may add one"
        reason = f"{bundles.text} of the Ray cluster; {state}"
        if reason != request.reason:
            request.reason = reason
            self._send(PlaceWaits(request_id, reason))

    def _reserve(self, bundles: Bundles) -> _Reservation:
        """Ask Ray for a placement group with `bundles`."""
        labels = {TYPE_LABEL: f"in({','.join(bundles.models)})"} if bundles.models else {}
        if bundles.avoided:
            labels[NODE_LABEL] = f"!in({','.join(sorted(bundles.avoided))})"
        group = placement_group(
            [{bundles.resource: amount} for amount in bundles.amounts],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[labels] * len(bundles.amounts),
        )
        return _Reservation(bundles, group)

    def _ask_for_devices(self, place: _Reservation) -> None:
        """Have the nodes of a place name its devices. A place on the CPU has none."""
        resource = place.bundles.resource
        if resource == "CPU":
            place.answers = [ray.put([]) for _ in place.nodes]
            return
        for index, (name, amount) in enumerate(zip(place.nodes, place.bundles.amounts, strict=True)):
            actor = self._use(name).actor
            place.answers.append(actor.name_devices.remote(place.group, index, resource, amount))

    def _use(self, name: str) -> _UsedNode:
        """Return a used node; start its actor and request its agent if it has none."""
        if name not in self._used:
            strategy = NodeAffinitySchedulingStrategy(name, soft=False)
            actor = ray.remote(num_cpus=0, max_restarts=0)(NodeActor).options(scheduling_strategy=strategy)
            self._last_agent += 1
            self._used[name] = _UsedNode(self._last_agent, actor.remote(__version__))
            self._send(NodeNeeded(name, self._last_agent))
        return self._used[name]

    def _agent_ended(self, name: str, node: _UsedNode) -> None:
        """Report that an agent has ended, and kill the actor of its node."""
        try:
            reason = ray.get(node.agent)
        except ray.exceptions.RayError as error:
            reason = f"could not be run by Ray: {error}"
        del self._used[name]
        ray.kill(node.actor)
        self._send(AgentEnded(node.number, reason))

    def _give_up(self, places: list[_Reservation]) -> None:
        """Give kept places back to Ray."""
        for place in places:
            del self._kept[place]
            self._remove(place)

    def _drop(self, request: _Request) -> None:
        """Give back what is reserved for a request."""
        if request.place is not None:
            self._remove(request.place)
            request.place = None

    def _remove(self, place: _Reservation) -> None:
        """Remove the group of a place, which gives its resources back to Ray."""
        remove_placement_group(place.group)
        if place.nodes:
            self._settled = monotonic() + _SETTLE_TIME


def _is_ready(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def _alive_nodes() -> dict[str, RayNode]:
    """Return the nodes of the cluster that are alive, by id."""
    return {
        node["NodeID"]: RayNode(
            node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"], node["Resources"], node["Labels"]
        )
        for node in ray.nodes()
        if node["Alive"]
    }
