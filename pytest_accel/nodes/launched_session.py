"""The driver's side of a session under a launcher: the other processes, and the fork servers that they keep."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import pytest

from pytest_accel.core.launcher_env import Outer, of_a_rank, without_local_rank
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.forkserver.server_client import Spawn, spawn_here
from pytest_accel.hardware.registry import make_vendor
from pytest_accel.nodes import agent, local_agent, machines
from pytest_accel.nodes.agent_client import FarKeeper
from pytest_accel.nodes.agent_messages import Hello
from pytest_accel.nodes.local_agent_client import Keeper
from pytest_accel.nodes.machines import Far, Rendezvous
from pytest_accel.nodes.remote_leases import FarSupply
from pytest_accel.nodes.rendezvous import MeetingError, gather, join

_KINDS = ("cuda", "rocm", "xpu", "hpu", "npu", "mlu", "musa", "tpu", "neuron")
"""Those that have masks."""
_STOPPED = 0.5
"""Seconds in which it is heard that another process has ended, when the launcher has said that this one is to end."""


def enter(early_config: pytest.Config, args: list[str], world: Outer) -> OuterSession:
    """Meet the other processes; gives rank 0 the session that it drives. The others come out of it as ``SystemExit``.

    `args` is pytest's own list of what it has still to read. ``pytest.UsageError`` where the processes do not agree.
    """
    args[:] = without_local_rank(args)
    where_to_meet = None
    if world.local_size != world.size:
        try:
            where_to_meet = machines.rendezvous(os.environ, world)
        except MeetingError as error:
            raise pytest.UsageError(str(error)) from None
    given = tuple(without_local_rank([str(arg) for arg in early_config.invocation_params.args]))
    where = str(early_config.invocation_params.dir)
    root = str(early_config.rootpath)
    node = machines.identity() if where_to_meet is not None else ""
    hello = Hello(world.rank, os.getpid(), given, where, root, _masks(), platform.node(), node)
    for name in of_a_rank(os.environ):
        del os.environ[name]  # Of the worlds to come each has its own, and this process is none's.
    try:
        if world.rank != 0:
            raise SystemExit(_keep(world, hello, where_to_meet))
        far: list[Far] = []
        near = list(range(1, world.size))
        if where_to_meet is not None:
            far, near = machines.receive(world, where_to_meet, hello)
        session = OuterSession(world, hello, gather(world, expected=near), far)
    except MeetingError as error:
        raise pytest.UsageError(str(error)) from None
    difference = differences(world.launcher, [hello, *session.hellos])
    if difference is not None:
        session.end(int(pytest.ExitCode.USAGE_ERROR))
        raise pytest.UsageError(difference)
    return session


def _keep(world: Outer, hello: Hello, where_to_meet: Rendezvous | None) -> int:
    if where_to_meet is not None:
        met = machines.call(world, where_to_meet, hello)
        if met is not None:
            return agent.keep(*met)
    return local_agent.keep(join(world, hello))


def _masks() -> dict[str, str]:
    names = {name for kind in _KINDS for name in make_vendor(kind).mask((), os.environ)}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def differences(launcher: str, hellos: Sequence[Hello]) -> str | None:
    """What keeps the processes from being one session; None: nothing. The first is rank 0's."""
    first = hellos[0]
    for other in hellos[1:]:
        for what, show in _COMPARED.items():
            far = other.node != first.node
            if _about(first, show, far=far) != _about(other, show, far=far):
                return (
                    f"the processes that {launcher} has started differ in their {what}: rank 0 has {show(first)}, rank "
                    f"{other.rank} has {show(other)}; give them the same, or --accel-launcher none"
                )
    return None


_COMPARED: Mapping[str, Callable[[Hello], str]] = {
    "arguments": lambda hello: " ".join(hello.args) or "none",
    "working directory": lambda hello: hello.directory,
    "root directory": lambda hello: hello.rootdir,
    "visible devices": lambda hello: _masked(hello),
}


def _masked(hello: Hello) -> str:
    return " ".join(f"{name}={value}" for name, value in hello.masks.items()) or "no mask"


def _about(hello: Hello, show: Callable[[Hello], str], *, far: bool) -> object:
    """What must be equal: of devices on another machine their number, since each machine has its own."""
    if far and show is _COMPARED["visible devices"]:
        return {name: len(value.split(",")) for name, value in hello.masks.items()}
    return show(hello)


class OuterSession:
    """The driver's knowledge of the other processes."""

    def __init__(self, world: Outer, own: Hello, found: Sequence[tuple[Hello, Connection]], far: Sequence[Far]) -> None:
        """`own` is this process's; `found` are the others of this machine, `far` those of other machines."""
        self.world = world
        self.hellos = [*(hello for hello, _ in found), *(one.hello for one in far)]
        self.layout = machines.layout_of(own, [hello.rank for hello, _ in found], far)
        self.on_lost: Callable[[str], None] | None = None
        """Gets what is to be said of a process that has ended before its time, in a thread of this object's."""
        self._before = dict(os.environ)
        self._ended = False
        self._lost = threading.Event()
        keepers: list[Keeper | FarKeeper] = [
            *(Keeper(hello, connection, self._lose, self._changes) for hello, connection in found),
            *(FarKeeper(one, self._name(one.hello.rank), self._lose, self._changes) for one in far),
        ]
        self._keepers = sorted(keepers, key=lambda keeper: keeper.hello.rank)

    @property
    def servers(self) -> tuple[Spawn, ...]:
        """The ways to start each rank's fork server."""
        return (spawn_here, *(keeper.spawn for keeper in self._keepers))

    @property
    def supplies(self) -> dict[int, FarSupply]:
        """The devices of the other machines, by number; each machine's first keeper is asked."""
        keepers = {keeper.hello.rank: keeper for keeper in self._keepers if isinstance(keeper, FarKeeper)}
        firsts = {number: min(node.servers) for number, node in enumerate(self.layout.nodes)}
        return {number: keepers[rank].supply for number, rank in firsts.items() if rank in keepers}

    @property
    def lost(self) -> str | None:
        """What there is to say of processes that have ended before their time."""
        gone = [keeper for keeper in self._keepers if keeper.lost]
        silent = {keeper.hello.node: keeper.silent for keeper in gone if isinstance(keeper, FarKeeper)}
        named = [
            f"rank {keeper.hello.rank} (pid {keeper.hello.pid}{self._on_node(keeper.hello.rank)})"
            for keeper in gone
            if not silent.get(keeper.hello.node)
        ]
        for node, why in silent.items():
            if why is not None:
                ranks = [keeper.hello.rank for keeper in self._keepers if keeper.hello.node == node]
                named.append(f"the node {self._name(ranks[0])} with {ranks_text(ranks)}: {why}")
        return f"{self.world.launcher} has lost {', '.join(named)}" if named else None

    @property
    def about(self) -> str:
        """The launched processes in a few words."""
        nodes = self.layout.nodes
        where = ", ".join(f"{node.name} ({ranks_text(node.servers)})" for node in nodes)
        return self.world.about if len(nodes) == 1 else f"{self.world.about} on {len(nodes)} nodes: {where}"

    def _name(self, rank: int) -> str:
        return next(node.name for node in self.layout.nodes if rank in node.servers)

    def _on_node(self, rank: int) -> str:
        return "" if rank in self.layout.near else f" on {self._name(rank)}"

    def heed_signals(self) -> None:
        """Have the session end with what there is to tell, when the launcher ends it.

        A launcher that sees one of its processes end sends SIGTERM to the others.
        """
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._lost.wait(_STOPPED)
        pytest.exit(self.lost or f"{self.world.launcher} has sent SIGTERM", returncode=pytest.ExitCode.INTERRUPTED)

    def end(self, status: int) -> None:
        """Have the others end with `status`, after this process."""
        self._ended = True
        if signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for keeper in self._keepers:
            keeper.end(status)

    def _lose(self) -> None:
        if self._ended:
            return
        self._lost.set()
        if self.on_lost is not None and self.lost is not None:
            self.on_lost(self.lost)

    def _changes(self) -> dict[str, str | None]:
        names = {name for name in self._before.keys() | os.environ if self._before.get(name) != os.environ.get(name)}
        return {name: os.environ.get(name) for name in names if not name.startswith("PYTEST_CURRENT_TEST")}
