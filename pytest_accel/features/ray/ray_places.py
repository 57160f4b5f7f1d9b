"""The places of a session in a Ray cluster: their placement groups, and the agents on the nodes that they use.

Everything happens in the loop of the helper process. A request is a task, which holds its place until it is cancelled.
"""

from __future__ import annotations

from asyncio import Future, Task, ensure_future, gather, get_running_loop, sleep, to_thread, wait, wait_for
from asyncio import TimeoutError as WaitTimeoutError
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from msgspec import structs
from ray.util import accelerators
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pytest_accel.core import loop_tasks
from pytest_accel.core.clock import monotonic
from pytest_accel.core.log import step
from pytest_accel.features.ray.cluster_node import difference, suite_code
from pytest_accel.features.ray.ray_actors import NodeActor, device_ids
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    AgentStarted,
    Invitation,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
    ToHelper,
)
from pytest_accel.features.ray.ray_resources import Bundles, RayNode, choose_bundles
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.pool.starter import LostPlaceError

_MODELS = frozenset(value for name, value in vars(accelerators).items() if name.isupper() and isinstance(value, str))
"""The models of accelerators that Ray knows."""
_UNREPORTED_WAIT = 0.2
"""Seconds that a request may wait before this is reported."""
_LOOK_INTERVAL = 0.5
"""Seconds between two checks of the cluster's nodes, and of the reason why a request waits."""
_SETTLE_TIME = 0.12
"""Seconds until the cluster's head knows of released resources (reports come every 0.1 s). A group that is requested
earlier, or that waits, may fail to be placed, and Ray tries again only after 0.7 s."""
_READY_TIMEOUT = 120.0
"""Seconds in which the nodes of a place must answer: Ray starts processes for this."""
_EXIT_TIMEOUT = 5.0
"""Seconds in which the agents must exit when the session ends, before they are killed."""


@dataclass(eq=False)
class _Agent:
    """An agent that runs or is being started."""

    machine: int
    """The number of its node in the session."""
    node: RayNode
    actor: Any


class Places:
    """The places of a session, and the agents on their nodes."""

    def __init__(
        self, send: Callable[[object], None], rootdir: str, environ: Mapping[str, str], *, can_scale: bool
    ) -> None:
        """`send` sends a message to the controller. `can_scale` is True if an autoscaler can add nodes.

        `rootdir` is the suite's root directory: a node whose files differ is not used. `environ` is the controller's
        environment.
        """
        self._send = send
        self._rootdir, self._environ = rootdir, environ
        self._can_scale = can_scale
        self._invitation: Invitation | None = None
        self._tasks: dict[int, Task[None]] = {}
        """The requests and the places, by the id of the request."""
        self._agents: dict[int, _Agent] = {}
        """The agents, by the number of their machine."""
        self._runs: list[Task[None]] = []
        """The task of each agent so far."""
        self._waiting: set[Future[Any]] = set()
        """Futures that are done when Ray has created a request's group, and cancelled when resources are released."""
        self._settled = 0.0
        """The time from which on the cluster's head knows of all resources that were released."""
        self._look()
        self._watch = loop_tasks.start(self._watch_nodes())

    def handle(self, message: ToHelper) -> None:
        match message:
            case RequestPlace(request_id):
                self._tasks[request_id] = loop_tasks.start(self._serve(message))
            case ReleasePlace(request_id):
                if (task := self._tasks.pop(request_id, None)) is not None:
                    task.cancel()
            case Invitation():
                self._invitation = message
            case AgentEnded(machine, reason):
                self._lose(machine, reason)

    async def close(self) -> None:
        """Give everything back to Ray."""
        self._watch.cancel()
        for task in self._tasks.values():
            task.cancel()
        # The controller has told the agents to exit. An agent that dies with its actor leaves its folder behind.
        await wait([*self._runs, *self._tasks.values(), self._watch], timeout=_EXIT_TIMEOUT)
        for machine in list(self._agents):
            self._lose(machine, "the session ends")

    # Nodes and agents

    async def _watch_nodes(self) -> None:
        while True:
            await sleep(_LOOK_INTERVAL)
            self._look()

    def _look(self) -> None:
        """Update the nodes of the cluster; the agents of lost nodes are lost."""
        self.nodes = {
            node["NodeID"]: RayNode(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                node["Resources"],
                node["Labels"],
            )
            for node in ray.nodes()
            if node["Alive"]
        }
        for agent in list(self._agents.values()):
            if agent.node.id not in self.nodes:
                self._lose(agent.machine, f"{agent.node.name} has left the Ray cluster")

    def _agent_on(self, node: RayNode) -> _Agent:
        """Return the agent on a node; start it if there is none."""
        for agent in self._agents.values():
            if agent.node.id == node.id:
                return agent
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        actor = ray.remote(num_cpus=0, max_restarts=0)(NodeActor).options(scheduling_strategy=strategy).remote()
        machine = len(self._runs) + 1
        agent = self._agents[machine] = _Agent(machine, node, actor)
        self._send(AgentStarted(node.name, node.address))
        self._runs.append(loop_tasks.start(self._run(agent)))
        return agent

    async def _run(self, agent: _Agent) -> None:
        """Run an agent until it ends, unless the code of its node differs from the controller's."""
        assert self._invitation is not None
        try:
            there = await wait_for(agent.actor.code.remote(self._rootdir), _READY_TIMEOUT)
            # Tests may have created files, so this does not remember the code.
            if (found := difference(await to_thread(suite_code, self._rootdir), there)) is not None:
                why = f"the machine {agent.node.name} cannot run the tests in {self._rootdir}: {found}"
                self._lose(agent.machine, why)
                return
            step("starts the agent of machine %d", agent.machine)
            invitation = structs.replace(self._invitation, machine=agent.machine)
            end = await agent.actor.run_agent.remote(invitation, self._environ)
        except WaitTimeoutError:
            end = f"was not started by Ray in {_READY_TIMEOUT:g} s"
        except ray.exceptions.RayError as error:
            end = f"could not be run by Ray: {error}"
        self._lose(agent.machine, f"the agent on {agent.node.name} {end}")

    def _lose(self, machine: int, why: str) -> None:
        """Kill an agent, and report its end; the next place on its node needs a new agent. No-op if it has ended."""
        agent = self._agents.pop(machine, None)
        if agent is not None:
            step("the agent of machine %d has ended: %s", machine, why)
            ray.kill(agent.actor)
            self._send(AgentEnded(machine, why))

    # A request

    async def _serve(self, request: RequestPlace) -> None:
        """Reserve a place, report it, and hold it until this task is cancelled."""
        try:
            await self._hold(request)
        except (PlaceError, ray.exceptions.RayError) as error:
            self._look()  # Ray reports the end of a process before the end of its node.
            self._tasks.pop(request.request_id, None)
            is_lost = not isinstance(error, PlaceError) or isinstance(error, LostPlaceError)
            self._send(PlaceFailed(request.request_id, str(error), is_lost))

    async def _hold(self, request: RequestPlace) -> None:
        while True:
            bundles = self._choose(request)
            async with self._group(bundles) as group:
                if not await self._is_created(group, bundles, request):
                    continue
                try:
                    self._send(await self._prepare(group, bundles, request.request_id))
                    await get_running_loop().create_future()
                finally:
                    self._settled = monotonic() + _SETTLE_TIME
                    for created in self._waiting:
                        created.cancel()

    def _choose(self, request: RequestPlace) -> Bundles:
        """Return the bundles for a request; raise PlaceError if the cluster cannot hold them."""
        bundles = choose_bundles(request.key, tuple(self.nodes.values()), _MODELS)
        shortage = bundles.shortage(self.nodes.values())
        if shortage is not None and not self._can_scale:
            raise PlaceError(shortage)
        return bundles

    @asynccontextmanager
    async def _group(self, bundles: Bundles) -> AsyncIterator[Any]:
        """Request a placement group, and remove it at the end."""
        await sleep(self._settled - monotonic())
        group = placement_group(
            [{bundles.resource: amount} for amount in bundles.amounts],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[bundles.labels] * len(bundles.amounts),
        )
        try:
            yield group
        finally:
            remove_placement_group(group)

    async def _is_created(self, group: Any, bundles: Bundles, request: RequestPlace) -> bool:
        """Wait until Ray has created a group, and report why that takes long.

        Return False if another group should be requested: other bundles are better now, since nodes have joined or are
        lost, or resources were released, and Ray would take its time to try again.
        """
        created = ensure_future(group.ready())
        self._waiting.add(created)
        reported, timeout = "", _UNREPORTED_WAIT
        try:
            while not (await wait([created], timeout=timeout))[0]:
                if self._choose(request) != bundles:
                    return False
                total = sum(node.resources.get(bundles.resource, 0) for node in self.nodes.values())
                free = ray.available_resources().get(bundles.resource, 0)
                reason = f"{bundles.text} of the Ray cluster; {free:g} of {total:g} are free"
                if bundles.shortage(self.nodes.values()) is not None:
                    reason += ", and its autoscaler may add a node that is large enough"
                if reason != reported:
                    self._send(PlaceWaits(request.request_id, reason))
                reported, timeout = reason, _LOOK_INTERVAL
            return not created.cancelled() and created.result() is not None
        finally:
            self._waiting.discard(created)
            created.cancel()

    async def _prepare(self, group: Any, bundles: Bundles, request_id: int) -> PlaceReserved:
        """Return the place of a group once its devices are known; start the agents of its nodes if they have none."""
        names = placement_group_table(group)["bundles_to_node_id"]
        self._look()  # A node may just have joined.
        if not self.nodes.keys() >= set(names.values()):
            raise LostPlaceError("a node has left the Ray cluster")
        parts = []
        for index, (ranks, amount) in enumerate(zip(bundles.ranks, bundles.amounts, strict=True)):
            node = self.nodes[names[index]]
            parts.append((self._agent_on(node).machine, ranks, self._devices(group, bundles.resource, amount, index)))
        try:
            devices = await wait_for(gather(*(named for _, _, named in parts)), _READY_TIMEOUT)
        except WaitTimeoutError:
            raise LostPlaceError(f"Ray has not named the devices of a place in {_READY_TIMEOUT:g} s") from None
        places = sorted((machine, ranks, found) for (machine, ranks, _), found in zip(parts, devices, strict=True))
        return PlaceReserved(
            request_id,
            tuple(machine for machine, ranks, _ in places for _ in range(ranks)),
            {machine: found for machine, _, found in places if found},
        )

    async def _devices(self, group: Any, resource: str, amount: float, index: int) -> tuple[str, ...]:
        """Return the devices of a bundle."""
        if resource == "CPU":
            return ()
        needs = {"num_gpus": amount} if resource == "GPU" else {"resources": {resource: amount}}
        strategy = PlacementGroupSchedulingStrategy(group, index)
        return tuple(await device_ids.options(scheduling_strategy=strategy, **needs).remote(resource))
