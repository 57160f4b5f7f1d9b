"""The controller's side of a Ray cluster: starts the helper process, and reserves places through it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from traceback import format_exc
from typing import BinaryIO, Protocol

from pytest_accel.core import threads
from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.kill import KILL_TIMEOUT, kill_tree
from pytest_accel.core.signals import signal_name
from pytest_accel.core.world_key import WorldKey
from pytest_accel.features.ray.agent_greeting import Invitation
from pytest_accel.features.ray.cluster import Place
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    Connect,
    Connected,
    HelperFailed,
    NodeJoined,
    NodeLost,
    NodeNeeded,
    PlaceFailed,
    PlaceReserved,
    PlaceWaits,
    ReleasePlace,
    RequestPlace,
    StartAgent,
    StopAgent,
    ToController,
)
from pytest_accel.features.ray.ray_resources import RayDemand, RayNode, demand_of
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.starter import PlaceError

_JOIN_TIMEOUT = 120.0
"""Seconds in which the agent of a node must join, once it is needed."""
_CLOSE_TIMEOUT = 10.0
"""Seconds that the helper may take to give everything back to Ray. After that it is killed.

Ray then takes everything back by itself, some seconds later.
"""

_TAIL = 10_000
"""Number of bytes at the end of the helper's output that are searched for its last error."""
_NATIVE_ERROR = re.compile(r"\[\S+ \S+ [CEFW] \d+ \d+\] ")
"""The beginning of a line that Ray's native code logs: time, severity, process, thread."""


class AgentMachines(Protocol):
    """The machines of the session, whose agents join (`pytest_accel.features.ray.cluster_machines`)."""

    def expect(self, number: int, name: str, address: str) -> Invitation:
        """Add a machine whose agent is about to be started; return the invitation for the agent."""

    def when_joined(self, number: int, on_join: Callable[[], None], on_failure: Callable[[str], None]) -> None:
        """Call `on_join` once the agent of a machine has joined, or `on_failure` if it never will, in any thread."""

    def give_up(self, number: int, why: str) -> None:
        """Record that the agent of a machine will not join; no-op if it has."""


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request for a place that has not been answered."""

    demand: RayDemand
    on_place: Callable[[Place], None]
    on_wait: Callable[[str], None]
    on_failure: Callable[[PlaceError], None]
    reserved: PlaceReserved | None = None
    """The place in the cluster, while the agents of its nodes are awaited."""
    retried: bool = False
    """True if an agent that was awaited has not joined, or has ended, and another place was requested."""


class RayCluster:
    """A Ray cluster, with the interface of a :class:`~pytest_accel.features.ray.cluster.Cluster`.

    Thread-safe. Callbacks are called without a lock held, in a thread of this object or of its `machines`.
    """

    def __init__(self, address: str, machines: AgentMachines) -> None:
        """Start to connect to the cluster at `address`: ``HOST:PORT``, or ``auto`` for that of this machine."""
        self._machines = machines
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 The helper writes to it as long as it runs.
        self._lock = threading.RLock()
        self._sending = threading.Lock()
        self._requests: dict[int, _PendingRequest] = {}
        self._last_request_id = 0
        self._cluster_nodes: dict[str, RayNode] = {}
        """The nodes of the cluster, by Ray's id."""
        self._can_scale = False
        self._numbers: dict[str, int] = {}
        """The numbers of the nodes whose agents run or are being started, by Ray's id."""
        self._timers: dict[int, threading.Timer] = {}
        """The timers that end the wait for agents that do not join, by the agent's number."""
        self._connected = threading.Event()
        """Set once the helper is connected, or has ended."""
        self._failure: str | None = None
        """Why no request can be met any more; None as long as the helper runs."""
        self._closing = False
        ours, theirs = unix_sockets.pair()
        unix_sockets.limit_writes(ours)
        with theirs:
            self._process = _start(theirs, self._log)
        self._connection = Connection(ours.detach())
        self._send(Connect(address, f"pytest-accel-{uuid.uuid4().hex}"))
        self._thread = threads.start(self._listen, "accel-ray")

    def connect(self, timeout: float) -> None:
        """Wait until the cluster is connected; raise PlaceError with the reason if it is not in `timeout` seconds."""
        self._connected.wait(timeout)
        with self._lock:
            if self._failure is None and not self._connected.is_set():
                self._failure = f"the Ray cluster did not answer within {timeout:g} s" + self._log_text()
                self._process.kill()
            if self._failure is not None:
                raise PlaceError(self._failure)

    @property
    def nodes(self) -> tuple[RayNode, ...]:
        """The nodes of the cluster that are alive; empty before it is connected."""
        with self._lock:
            return tuple(self._cluster_nodes.values())

    @property
    def can_scale(self) -> bool:
        """True if an autoscaler can add nodes to the cluster."""
        with self._lock:
            return self._can_scale

    # Cluster

    def place(
        self,
        key: WorldKey,
        on_place: Callable[[Place], None],
        on_wait: Callable[[str], None],
        on_failure: Callable[[PlaceError], None],
        avoided: Collection[int] = (),
    ) -> int:
        with self._lock:
            self._last_request_id += 1
            request_id = self._last_request_id
            try:
                demand = replace(
                    demand_of(key),
                    avoided=frozenset(name for name, number in self._numbers.items() if number in avoided),
                )
            except PlaceError as error:
                self._fail_later(on_failure, error)
                return request_id
            if self._failure is not None:
                self._fail_later(on_failure, PlaceError(self._failure))
                return request_id
            self._requests[request_id] = _PendingRequest(demand, on_place, on_wait, on_failure)
        self._send(RequestPlace(request_id, demand))
        return request_id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            if self._requests.pop(request_id, None) is None:
                return
        self._send(ReleasePlace(request_id))

    def release(self, place: Place) -> None:
        self._send(ReleasePlace(place.request_id))

    def drop_machine(self, number: int) -> None:
        """Stop agent `number`, since its connection is lost, so that its node gets a new one. No-op if it has ended."""
        with self._lock:
            found = [name for name, current in self._numbers.items() if current == number]
            for name in found:
                del self._numbers[name]
        if found:
            self._send(StopAgent(number))

    def close(self) -> None:
        """Give everything back to Ray, end the helper, and wait for its exit. Requests that are waiting fail."""
        with self._lock:
            self._closing = True
            timers = list(self._timers.values())
        for timer in timers:
            timer.cancel()
        # shutdown() instead of close(), because the thread may be waiting on the descriptor.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:
            kill_tree(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT)
        if threading.current_thread() is not self._thread and threads.end(self._thread):
            self._connection.close()
            self._log.close()

    def _send(self, message: object) -> None:
        with self._sending, contextlib.suppress(OSError):  # If the helper has ended, the thread reports that.
            try:
                self._connection.send_bytes(encode(message))
            except BlockingIOError:  # The helper does not read, and may have got a part of the message.
                self._process.kill()

    def _fail_later(self, on_failure: Callable[[PlaceError], None], error: PlaceError) -> None:
        """Call `on_failure` in a new thread, since :meth:`place` must not call it."""
        threads.start(on_failure, "accel-ray-failure", error)

    # In the thread

    def _listen(self) -> None:
        """Handle the helper's messages until it ends; then fail all requests."""
        try:
            self._receive_messages()
            failure = self._end_text()
        except BaseException:
            failure = f"the thread that listens to Ray's helper has ended with an error:\n{format_exc()}"
        with self._lock:
            self._failure = self._failure or failure
            requests, self._requests = list(self._requests.values()), {}
        self._connected.set()
        for request in requests:
            request.on_failure(PlaceError(self._failure))

    def _receive_messages(self) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            self._handle(decode(data, ToController))

    def _handle(self, message: ToController) -> None:
        match message:
            case Connected(nodes, can_scale):
                with self._lock:
                    self._cluster_nodes = {node.id: node for node in nodes}
                    self._can_scale = can_scale
                self._connected.set()
            case HelperFailed(reason):
                with self._lock:
                    self._failure = reason
            case NodeJoined(node):
                with self._lock:
                    self._cluster_nodes[node.id] = node
            case NodeLost(name):
                self._node_lost(name)
            case NodeNeeded(name, number):
                self._start_agent(name, number)
            case AgentEnded(number, reason):
                self._agent_ended(number, f"the agent {reason}")
            case PlaceReserved(request_id):
                self._await_agents(request_id, message)
            case PlaceWaits(request_id, reason):
                with self._lock:
                    request = self._requests.get(request_id)
                if request is not None:
                    request.on_wait(reason)
            case PlaceFailed(request_id, reason):
                self._fail(request_id, reason)

    def _node_lost(self, name: str) -> None:
        """Forget a lost node, end the wait for its agent, and place again the requests that were to use it."""
        with self._lock:
            node = self._cluster_nodes.pop(name)
            awaited = [
                request_id
                for request_id, request in self._requests.items()
                if request.reserved is not None and any(bundle.node == name for bundle in request.reserved.bundles)
            ]
            agent = self._numbers.get(name)
        for request_id in awaited:
            self._place_again(request_id)
        if agent is not None:
            self._agent_ended(agent, f"{node.name} has left the Ray cluster")

    def _agent_ended(self, number: int, reason: str) -> None:
        """Forget an agent that has ended, so that its node gets a new one when it is used again."""
        with self._lock:
            self._numbers = {name: current for name, current in self._numbers.items() if current != number}
        self._machines.give_up(number, reason)

    def _start_agent(self, name: str, number: int) -> None:
        """Have the helper start the agent of a node, and limit the time in which the agent must join."""
        with self._lock:
            node = self._cluster_nodes[name]
            self._numbers[name] = number
            invitation = self._machines.expect(number, node.name, node.address)
            reason = f"the agent on {node.name} has not joined within {_JOIN_TIMEOUT:g} s"
            timer = self._timers[number] = threading.Timer(_JOIN_TIMEOUT, self._machines.give_up, (number, reason))
        timer.daemon = True
        timer.start()
        self._machines.when_joined(number, timer.cancel, lambda _: timer.cancel())
        self._send(StartAgent(number, invitation.line()))

    def _await_agents(self, request_id: int, message: PlaceReserved) -> None:
        """Answer a request as soon as the agents of all nodes of its place have joined."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:  # The request was cancelled, and `cancel` has told the helper.
                return
            request.reserved = message
            machines = [self._numbers.get(bundle.node) for bundle in message.bundles]
        known = [one for one in machines if one is not None]
        if len(known) < len(machines):  # An agent has ended since the place was reserved.
            self._place_again(request_id)
            return
        self._await_next(request_id, message, known, 0)

    def _await_next(self, request_id: int, message: PlaceReserved, machines: list[int], position: int) -> None:
        """Wait for the agents of `machines`, one after the other from `position` on, and then answer the request.

        `machines` has the number of the machine of each bundle.
        """
        if position < len(machines):
            on_join = partial(self._await_next, request_id, message, machines, position + 1)
            on_failure = partial(self._not_joined, request_id, message, machines[position])
            self._machines.when_joined(machines[position], on_join, on_failure)
            return
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.reserved is not message:
                return
            del self._requests[request_id]
        bundles = dict(sorted(zip(machines, message.bundles, strict=True), key=itemgetter(0)))
        ranks = tuple(machine for machine, bundle in bundles.items() for _ in range(bundle.ranks))
        devices = {machine: bundle.devices for machine, bundle in bundles.items() if bundle.devices}
        request.on_place(Place(request_id, ranks, devices))

    def _not_joined(self, request_id: int, message: PlaceReserved, machine: int, reason: str) -> None:
        """Request another place, since an agent has not joined or has ended; fail the request the second time."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.reserved is not message:
                return
            retried, request.retried = request.retried, True
        self.drop_machine(machine)
        if retried:
            self._send(ReleasePlace(request_id))
            self._fail(request_id, reason)
        else:
            self._place_again(request_id)

    def _place_again(self, request_id: int) -> None:
        """Give the place of a request back, and request another one."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None:
                return
            request.reserved = None
            # With the lock held, so that the message of a concurrent `cancel` is the last about this request.
            self._send(ReleasePlace(request_id))
            self._send(RequestPlace(request_id, request.demand))

    def _fail(self, request_id: int, reason: str) -> None:
        with self._lock:
            request = self._requests.pop(request_id, None)
        if request is not None:
            request.on_failure(PlaceError(reason))

    def _end_text(self) -> str:
        """Wait for the helper's exit, and return a message with the reason."""
        try:
            self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:  # The helper has closed the connection, but Ray does not shut down in it.
            kill_tree(self._process.pid)
        try:
            status = self._process.wait(KILL_TIMEOUT)
            end = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"
        except subprocess.TimeoutExpired:
            end = f"could not be killed (pid {self._process.pid})"
        if self._closing:
            return "the session has left the Ray cluster"
        if not self._connected.is_set():
            return (
                f"the process that connects to the Ray cluster {end}{self._log_text()}; pytest's machine must be a "
                "node of the cluster (ray start --address=HOST:PORT)"
            )
        return f"the connection to the Ray cluster is lost: the process that held it {end}{self._log_text()}"

    def _log_text(self) -> str:
        """Return the helper's last error from the log of Ray's native code, after a colon; empty if there is none."""
        size = os.fstat(self._log.fileno()).st_size
        end = os.pread(self._log.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace")
        lines = [line for line in end.splitlines() if _NATIVE_ERROR.match(line)]
        return f": {lines[-1]}" if lines else ""


def _start(end: socket.socket, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the helper, which serves on the socket `end` and writes to `log`."""
    source = f"from pytest_accel.features.ray.ray_process import main; main({end.fileno()}, {os.getpid()})"
    return subprocess.Popen(
        python_command(source, path=sys.path),
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=unmeasured(os.environ),
        cwd="/",  # Ray adds the working directory to sys.path on the nodes.
        start_new_session=True,  # Ctrl-C at the terminal must interrupt the driver only.
    )
