"""The helper process that talks to Ray for the controller, and what it runs in Ray's own processes on the nodes.

The controller never imports ray: tests that use Ray themselves would share its connection, and Ray would end the
process if the cluster's head is lost. The helper is what Ray calls a driver: Ray removes its placement groups and
actors when it exits. The helper exits when its connection to the controller is closed, or when the controller exits.

Everything happens in one loop. A request for a place is a task, which holds its placement group until it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import socket
import subprocess
import tempfile
from asyncio import Future, Task, ensure_future, gather, get_running_loop, sleep, to_thread, wait, wait_for
from asyncio import TimeoutError as WaitTimeoutError
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from traceback import print_exc
from typing import Any

import psutil
import ray
from msgspec import structs
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.experimental import internal_kv
from ray.util import accelerators
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pytest_accel.compat import loop_tasks
from pytest_accel.core import log, processes
from pytest_accel.core.clock import monotonic
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.log import step
from pytest_accel.core.truncation import read_end
from pytest_accel.features.ray.cluster_node import additions, difference, suite_code
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    AgentStarted,
    Connected,
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
from pytest_accel.messages.struct_messages import encode, frame, read_message
from pytest_accel.pool.starter import LostPlaceError

_REACH_TIMEOUT = 5.0
"""Seconds in which the cluster's address must accept a connection; Ray would try for minutes."""
_MODELS = frozenset(value for name, value in vars(accelerators).items() if name.isupper() and isinstance(value, str))
"""The models of accelerators that Ray knows."""
_UNREPORTED_WAIT = 0.2
"""Seconds that a request may wait before this is reported."""
_LOOK_INTERVAL = 0.5
"""Seconds between two checks of the cluster's nodes and the reason, while a request waits."""
_SETTLE_TIME = 0.12
"""Seconds until the cluster's head knows of released resources (reports come every 0.1 s). A group that is requested
earlier, or that waits, may fail to be placed, and Ray tries again only after 0.7 s."""
_DEVICES_TIMEOUT = 120.0
"""Seconds in which Ray must name the devices of a place: it starts processes for this."""
_EXIT_TIMEOUT = 5.0
"""Seconds in which the agents must exit when the session ends, before they are killed."""
_TAIL = 4_000
"""Maximum number of bytes of an agent's output that are shown."""
_OF_RAY = ("RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS")
"""Variables that Ray adds to the environment of a node."""


def main(descriptor: int, parent: int, address: str, rootdir: str) -> None:
    """Serve the controller, the process `parent`, over the connection with this `descriptor`.

    `address` is the cluster's: ``HOST:PORT``, or ``auto`` for the cluster of this machine. `rootdir` is the suite's.
    """
    processes.die_with_parent(parent)
    log.start("Ray client")
    asyncio.run(_serve(socket.socket(fileno=descriptor), address, rootdir))


async def _serve(connection: socket.socket, address: str, rootdir: str) -> None:
    """Handle messages until the controller closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(message: object) -> None:
        writer.write(frame(encode(message)))

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the helper because of an error in a task: the next read raises it."""
        if not context.keys() & {"task", "future"}:  # With these, asyncio names a failure that nobody waits for.
            reader.set_exception(context.get("exception") or RuntimeError(context["message"]))

    asyncio.get_running_loop().set_exception_handler(fail)
    try:
        step("connects to the Ray cluster: %s", address)
        _connect(address)
        can_scale = _can_scale()
        places = Places(send, rootdir, can_scale=can_scale)
        send(Connected(tuple(places.nodes.values()), can_scale))
        step("is connected; the cluster has %d machines", len(places.nodes))
        while (message := await read_message(reader, ToHelper)) is not None:
            places.handle(message)
        step("ends: the controller has closed the connection")
        await places.close()
        ray.shutdown()
    except PlaceError as error:
        step("ends: %s", error)
        send(Connected(error=str(error)))
    except Exception:
        print_exc()  # The controller shows the end of the output when the connection ends.
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _connect(address: str) -> None:
    """Connect to the cluster; raise PlaceError if it cannot be reached."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _REACH_TIMEOUT).close()
        except OSError as error:
            raise PlaceError(f"no Ray cluster at {address}: {error}") from error
    where = "of this machine" if address == "auto" else f"at {address}"
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level="ERROR")
    except Exception as error:  # ConnectionError, RuntimeError and others, as for a mismatch of versions.
        if address == "auto" and isinstance(error, ConnectionError):
            raise PlaceError(
                f"no Ray cluster runs on {platform.node()}; start one (ray start --head), or join one "
                "(ray start --address=HOST:PORT)"
            ) from error
        reason = " ".join(str(error).split())  # The message of a version mismatch has seven lines.
        raise PlaceError(f"the Ray cluster {where} cannot be used: {reason}") from error


def _can_scale() -> bool:
    """Return whether an autoscaler can add nodes to the cluster.

    Ray's monitor of a cluster without an autoscaler calls the type of each node ``node_ID``. There is no public
    function for this. The sources are the same as for ``ray status``: the report of version 1 of the autoscaler, and
    the state of version 2, in which the counter `autoscaler_version` is 0 if there is no such autoscaler.
    """
    status = internal_kv._internal_kv_get(b"__autoscaling_status")
    report = json.loads(status).get("autoscaler_report") if status is not None else None
    types = (report.get("node_type_mapping") if report is not None else None) or {}
    state = get_cluster_status(ray.get_runtime_context().gcs_address)
    if state.stats.autoscaler_version not in (None, "0"):
        types |= {node.node_id: node.ray_node_type_name for node in (*state.active_nodes, *state.idle_nodes)}
    return any(kind != f"node_{node}" for node, kind in types.items())


@dataclass(eq=False)
class _Agent:
    """An agent that runs or is being started."""

    machine: int
    """The number of its node in the session."""
    node: RayNode
    actor: Any


class Places:
    """The places of a session, and the agents on their nodes."""

    def __init__(self, send: Callable[[object], None], rootdir: str, *, can_scale: bool) -> None:
        """`send` sends a message to the controller. `can_scale` is True if an autoscaler can add nodes.

        `rootdir` is the suite's root directory: a node whose files differ is not used.
        """
        self._send = send
        self._rootdir = rootdir
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
        for task in self._tasks.values():
            task.cancel()
        # The controller has told the agents to exit. An agent that dies with its actor leaves its folder behind.
        if tasks := [*self._runs, *self._tasks.values()]:
            await wait(tasks, timeout=_EXIT_TIMEOUT)
        for machine in list(self._agents):
            self._lose(machine, "the session ends")

    # Nodes and agents

    def _look(self) -> None:
        """Update the nodes of the cluster."""
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
        """Run an agent until it ends."""
        assert self._invitation is not None
        invitation = encode(structs.replace(self._invitation, machine=agent.machine))
        code = await to_thread(suite_code, self._rootdir)  # Tests may have created files, so this is not remembered.
        step("starts the agent of machine %d", agent.machine)
        try:
            end = await agent.actor.run_agent.remote(invitation, dict(os.environ), self._rootdir, code)
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
        self._look()
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
            devices = await wait_for(gather(*(named for _, _, named in parts)), _DEVICES_TIMEOUT)
        except WaitTimeoutError:
            raise LostPlaceError(f"Ray has not named the devices of a place in {_DEVICES_TIMEOUT:g} s") from None
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


class NodeActor:
    """An actor that represents one node: it starts the node's agent, which ends with it."""

    def run_agent(self, invitation: bytes, environ: Mapping[str, str], rootdir: str, code: Mapping[str, str]) -> str:
        """Run the agent, and return how it ended, with the end of its output.

        A node that would run the tests below `rootdir` with other code than `code`, the controller's, has no agent.
        `environ` is the helper's environment, which is the controller's but for Ray's own variables.
        """
        if (found := difference(code, suite_code(rootdir))) is not None:
            return f"cannot run the tests in {rootdir}: {found}"
        environment = _node_environment()
        source = f"from pytest_accel.features.ray.cluster_node import run; run({os.getpid()})"
        with tempfile.TemporaryFile() as output:  # A pipe could stay open in processes that tests leave behind.
            done = subprocess.run(
                python_command(source, path=None),
                input=invitation,
                stdout=output,
                stderr=output,
                env={**environment, **additions(environ, environment)},
                start_new_session=True,
                check=False,
            )
            text = read_end(output.fileno(), longest=_TAIL).strip()
        return f"exited with status {done.returncode}" + (f":\n{text}" if text else "")


# With Ray's default for `max_calls`, a process of Ray exits after a task that uses GPUs.
@ray.remote(num_cpus=0, max_calls=0, max_retries=0)  # type: ignore[untyped-decorator]
def device_ids(resource: str) -> list[str]:
    """Return the ids of this task's devices: values of the mask, as a process without a mask numbers them.

    Only a task in a bundle can ask Ray for them. The process that runs it is used again for later bundles.
    """
    ids: list[str] = ray.get_runtime_context().get_accelerator_ids()[resource]
    return sorted(ids, key=lambda one: (len(one), one))


def _node_environment() -> dict[str, str]:
    """Return the environment in which the node was started (``ray start``).

    The actor's own has additional variables, among them ``OMP_NUM_THREADS=1``, masks that hide devices, and
    ``PYTHONBREAKPOINT``. So this reads the environment of the parent process, which is Ray's own.
    """
    environment = psutil.Process(os.getppid()).environ()
    for name in _OF_RAY:
        environment.pop(name, None)
    # Ray's memory allocator is meant for the parent process only.
    if environment.get("LD_PRELOAD", "").startswith(os.path.dirname(ray.__file__)):
        del environment["LD_PRELOAD"]
    return environment
