"""The driver's side of a session under a launcher: the other processes, and the fork servers that they keep."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pytest_accel.hardware.registry import make_vendor
from pytest_accel.launch import outer_keeper
from pytest_accel.launch.outer import Outer, of_a_rank, without_local_rank
from pytest_accel.launch.outer_meeting import MeetingError, gather, join
from pytest_accel.launch.outer_messages import End, Hello, KillServer, ServerEnded, StartServer, Welcome
from pytest_accel.worlds import descriptors
from pytest_accel.worlds.messages import SessionSpec
from pytest_accel.worlds.starter import ServerProcess, Spawn, spawn_here

_KINDS = ("cuda", "rocm", "xpu", "hpu", "npu", "mlu", "musa", "tpu", "neuron")
"""Those that have masks."""
_END_PATIENCE = 10.0
_STOPPED = 0.5
"""Seconds in which it is heard that another process has ended, when the launcher has said that this one is to end."""


def enter(early_config: pytest.Config, args: list[str], world: Outer) -> OuterSession:
    """Meet the other processes; gives rank 0 the session that it drives. The others come out of it as ``SystemExit``.

    `args` is pytest's own list of what it has still to read. ``pytest.UsageError`` where the processes do not agree.
    """
    args[:] = without_local_rank(args)
    if world.local_size != world.size:
        _refuse(
            world,
            f"{world.launcher} has started {world.size} processes, {world.local_size} of them on this "
            "machine: several machines are not supported yet (--accel-launcher none: each runs all tests by itself)",
        )
    given = tuple(without_local_rank([str(arg) for arg in early_config.invocation_params.args]))
    where = str(early_config.invocation_params.dir)
    hello = Hello(world.rank, os.getpid(), given, where, str(early_config.rootpath), _masks())
    for name in of_a_rank(os.environ):
        del os.environ[name]  # Of the worlds to come each has its own, and this process is none's.
    try:
        if world.rank != 0:
            raise SystemExit(outer_keeper.keep(join(world, hello)))
        session = OuterSession(world, gather(world))
    except MeetingError as error:
        raise pytest.UsageError(str(error)) from None
    difference = differences(world.launcher, [hello, *session.hellos])
    if difference is not None:
        session.end(int(pytest.ExitCode.USAGE_ERROR))
        raise pytest.UsageError(difference)
    return session


def _refuse(world: Outer, why: str) -> None:
    if world.rank != 0:
        raise SystemExit(int(pytest.ExitCode.USAGE_ERROR))
    raise pytest.UsageError(why)


def _masks() -> dict[str, str]:
    names = {name for kind in _KINDS for name in make_vendor(kind).mask((), os.environ)}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def differences(launcher: str, hellos: Sequence[Hello]) -> str | None:
    """What keeps the processes from being one session; None: nothing. The first is rank 0's."""
    first = hellos[0]
    for other in hellos[1:]:
        for what, show in _COMPARED.items():
            if show(first) != show(other):
                return (
                    f"the processes that {launcher} has started differ in their {what}: rank 0 has {show(first)}, rank "
                    f"{other.rank} has {show(other)}; give them the same, or --accel-launcher none"
                )
    return None


_COMPARED: Mapping[str, Callable[[Hello], str]] = {
    "arguments": lambda hello: " ".join(hello.args) or "none",
    "working directory": lambda hello: hello.directory,
    "root directory": lambda hello: hello.rootdir,
    "visible devices": lambda hello: " ".join(f"{name}={value}" for name, value in hello.masks.items()) or "no mask",
}


class OuterSession:
    """The driver's knowledge of the other processes."""

    def __init__(self, world: Outer, found: Sequence[tuple[Hello, Connection]]) -> None:
        self.world = world
        self.hellos = [hello for hello, _ in found]
        self.on_lost: Callable[[str], None] | None = None
        """Gets what is to be said of a process that has ended before its time, in a thread of this object's."""
        self._before = dict(os.environ)
        self._ended = False
        self._lost = threading.Event()
        self._keepers = [Keeper(hello, connection, self._lose, self._changes) for hello, connection in found]

    @property
    def servers(self) -> tuple[Spawn, ...]:
        """The ways to start each rank's fork server."""
        return (spawn_here, *(keeper.spawn for keeper in self._keepers))

    @property
    def lost(self) -> str | None:
        """What there is to say of processes that have ended before their time."""
        gone = [keeper.hello for keeper in self._keepers if keeper.lost]
        if not gone:
            return None
        named = ", ".join(f"rank {hello.rank} (pid {hello.pid})" for hello in gone)
        return f"{self.world.launcher} has lost {named}"

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


class Keeper:
    """Another launched process, as the driver reaches it."""

    def __init__(
        self,
        hello: Hello,
        connection: Connection,
        on_lost: Callable[[], None],
        changes: Callable[[], dict[str, str | None]],
    ) -> None:
        """`changes` gives what the environment of its fork servers is to differ in from its own."""
        self.hello = hello
        self.lost = False
        self._connection = connection
        self._on_lost = on_lost
        self._changes = changes
        self._sending = threading.Lock()
        self._servers: list[KeptServer] = []
        self._send(Welcome(os.getpid()))
        threading.Thread(target=self._listen, name=f"accel-keeper-{hello.rank}", daemon=True).start()

    def spawn(self, spec: SessionSpec, end: socket.socket) -> ServerProcess:
        """Have it start a fork server."""
        server = KeptServer(partial(self._send, KillServer(len(self._servers))))
        message = StartServer(len(self._servers), spec, self._changes())
        self._servers.append(server)
        with self._sending:
            try:
                self._connection.send(message)
                descriptors.send(self._connection, [end.fileno()])
            except OSError:
                server.ended.set()
        if self.lost:
            server.ended.set()
        return server

    def end(self, status: int) -> None:
        """Have it end with `status`."""
        self._send(End(status))

    def _send(self, message: object) -> None:
        with self._sending, contextlib.suppress(OSError):  # It is gone, which the thread finds.
            self._connection.send(message)

    def _listen(self) -> None:
        while True:
            try:
                message: Any = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, ServerEnded):
                self._servers[message.number].ended.set()
        self.lost = True
        for server in self._servers:
            server.ended.set()
        self._on_lost()


class KeptServer:
    """A fork server that is a keeper's child."""

    def __init__(self, have_killed: Callable[[], None]) -> None:
        self.ended = threading.Event()
        self._have_killed = have_killed

    def kill(self) -> None:
        self._have_killed()

    def kill_tree(self) -> None:
        self._have_killed()

    def wait(self, patience: float | None) -> bool:
        # A keeper that somebody has stopped says nothing.
        return self.ended.wait(_END_PATIENCE if patience is None else patience)
