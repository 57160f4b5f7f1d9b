"""A launched process on another machine than rank 0: it keeps a fork server there, and carries what goes to and fro."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from pytest_accel.core import prctl, shared_memory, unix_sockets
from pytest_accel.core.connect import ASK, SERVER, named_rank
from pytest_accel.core.kill import kill_marked
from pytest_accel.core.messages import SessionSpec
from pytest_accel.core.paths import private_directory, server_log_path, socket_path
from pytest_accel.diagnostics.exit_status import tail
from pytest_accel.diagnostics.inspector import answer
from pytest_accel.forkserver.server_client import OwnServer
from pytest_accel.nodes.agent_messages import End, KillServer, ServerEnded, StartServer
from pytest_accel.nodes.local_agent import LOST, PATIENCE, changed
from pytest_accel.nodes.machines import Link
from pytest_accel.nodes.remote_leases import Agent
from pytest_accel.nodes.tcp_mux import Bridge, Opened
from pytest_accel.settings.machine import machine_for


def keep(link: Link, clock: float) -> int:
    """Obey the driver until it ends; gives its exit status. Its clock is this machine's and `clock`."""
    # A Ctrl-C at the terminal is the driver's to hear.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper = _FarKeeper(link, clock)
    try:
        return keeper.obey()
    finally:
        keeper.close()


class _FarKeeper:
    def __init__(self, link: Link, clock: float) -> None:
        self._clock = clock
        self._bridge = Bridge(link.socket, key=link.key, first=1, open_stream=self._open, take=self._take)
        self._server: OwnServer | None = None
        self._stream: socket.socket | None = None
        """The driver's end of the connection to the fork server, until the bridge has it."""
        self._number = 0
        self._spec: SessionSpec | None = None
        self._status = LOST
        self._agent = Agent(self._bridge.send, machine_for)

    def obey(self) -> int:
        why = self._bridge.run()
        if self._bridge.broken:  # The driver reports any other end.
            print(f"accel: the connection to rank 0 has ended: {why}", file=sys.stderr, flush=True)
        return self._status

    def _take(self, message: Any) -> None:
        if isinstance(message, StartServer):
            try:
                self._start(message)
            except Exception:
                self._bridge.send(ServerEnded(message.number, traceback.format_exc()))
        elif isinstance(message, KillServer):
            if self._server is not None and message.number == self._number:
                self._server.kill_tree()
        elif isinstance(message, End):
            self._status = message.status
            # The driver's exit status is the first: a launcher that sees one that is not 0 ends what it has started.
            self._bridge.expire(PATIENCE)
        else:
            self._agent.take(message)

    def _start(self, message: StartServer) -> None:
        self._remove_folder()
        directory = private_directory()
        shared = os.path.exists(message.token)
        basetemp = message.spec.basetemp if shared else os.path.join(directory, "tmp")
        spec = replace(message.spec, directory=directory, basetemp=basetemp, far=True, clock=self._clock, shared=shared)
        self._spec, self._number = spec, message.number
        ours, theirs = socket.socketpair()
        self._stream = ours
        with theirs:
            self._server = OwnServer(spec, theirs, changed(message.environment))
        _when_ended(self._server, self._bridge, self._on_server_end)

    def _on_server_end(self) -> None:
        """What its ranks have started, and that has left them, is of no use without it."""
        assert self._server is not None
        assert self._spec is not None
        self._server.wait(None)
        self._server = None
        kill_marked(self._spec.directory)
        shared_memory.remove_all(self._spec.directory)
        self._bridge.send(ServerEnded(self._number, tail(server_log_path(self._spec.directory, self._spec.server))))

    def _open(self, name: str) -> Opened:
        """What the driver wants to talk to; OSError where it is not there."""
        if name == SERVER and self._stream is not None:
            stream, self._stream = self._stream, None
            return Opened(stream)
        if self._spec is None:
            raise FileNotFoundError(name)
        if name == ASK:
            ours, theirs = socket.socketpair()
            call = Connection(theirs.detach())
            threading.Thread(target=answer, args=(call, self._spec.directory), name="accel-scout", daemon=True).start()
            return Opened(ours)
        named = named_rank(name)
        if named is None:
            raise FileNotFoundError(name)
        world, rank, pid = named
        return Opened(unix_sockets.connect(socket_path(self._spec.directory, world, rank)), prctl.end_of(pid))

    def close(self) -> None:
        """The bridge is down, and with it the fork server's connection, so that it ends by itself."""
        if self._stream is not None:
            self._stream.close()
        if self._server is not None and not self._server.wait(PATIENCE):
            self._server.kill_tree()
            self._server.wait(None)
        self._agent.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._spec is not None:
            kill_marked(self._spec.directory)
            shared_memory.remove_all(self._spec.directory)
            shutil.rmtree(self._spec.directory, ignore_errors=True)


def _when_ended(server: OwnServer, bridge: Bridge, call: Callable[[], None]) -> None:
    end = prctl.end_of(server.process.pid)
    if end is not None:
        bridge.watch(end, call)
        return
    # Where the kernel does not tell, a thread waits, and what it holds of a pipe is at its end then.
    source, target = os.pipe()

    def wait() -> None:
        server.wait(None)
        with contextlib.suppress(OSError):
            os.close(target)

    bridge.watch(source, call)
    threading.Thread(target=wait, daemon=True).start()
