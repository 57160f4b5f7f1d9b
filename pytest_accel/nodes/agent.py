"""The agent of a launched process on another node than rank 0.

The agent runs a fork server on its node and connects it, and the ranks, to the driver through a :class:`TcpMux`.
"""

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
from pytest_accel.core.paths import private_directory, server_log_path, socket_path
from pytest_accel.core.session_spec import SessionSpec
from pytest_accel.diagnostics.exit_status import tail
from pytest_accel.diagnostics.inspector import answer
from pytest_accel.forkserver.server_client import OwnServer
from pytest_accel.nodes.agent_messages import End, KillServer, ServerEnded, StartServer
from pytest_accel.nodes.local_agent import LOST, TIMEOUT, changed_environment
from pytest_accel.nodes.machines import AuthenticatedLink
from pytest_accel.nodes.remote_leases import LeaseAgent
from pytest_accel.nodes.tcp_mux import StreamTarget, TcpMux
from pytest_accel.settings.machine import machine_for


def serve_driver(link: AuthenticatedLink, clock: float) -> int:
    """Serve the driver until it ends; return the exit status for this process.

    `clock` is the number of seconds to add to this node's clock to get the driver's.
    """
    # The driver handles a Ctrl-C at the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = _TcpAgent(link, clock)
    try:
        return agent.run()
    finally:
        agent.close()


class _TcpAgent:
    """The agent's state: its connection to the driver and its current fork server."""

    def __init__(self, link: AuthenticatedLink, clock: float) -> None:
        self._clock = clock
        self._mux = TcpMux(link.socket, key=link.key, first=1, open_stream=self._open, take=self._handle)
        self._server: OwnServer | None = None
        self._stream: socket.socket | None = None
        """The driver's end of the connection to the fork server, until the driver opens its stream."""
        self._number = 0
        self._spec: SessionSpec | None = None
        self._status = LOST
        self._lease_agent = LeaseAgent(self._mux.send, machine_for)

    def run(self) -> int:
        """Handle messages until the connection ends; return the exit status."""
        why = self._mux.run()
        if self._mux.broken:  # The driver reports any other cause.
            print(f"accel: the connection to rank 0 has ended: {why}", file=sys.stderr, flush=True)
        return self._status

    def _handle(self, message: Any) -> None:
        if isinstance(message, StartServer):
            try:
                self._start(message)
            except Exception:
                self._mux.send(ServerEnded(message.number, traceback.format_exc()))
        elif isinstance(message, KillServer):
            if self._server is not None and message.number == self._number:
                self._server.kill_tree()
        elif isinstance(message, End):
            self._status = message.status
            # The driver exits first: a launcher that sees another exit status than 0 terminates all processes.
            self._mux.expire(TIMEOUT)
        else:
            self._lease_agent.handle(message)

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
            self._server = OwnServer(spec, theirs, changed_environment(message.environment))
        _when_ended(self._server, self._mux, self._on_server_end)

    def _on_server_end(self) -> None:
        """Clean up after a fork server that has ended, and tell the driver.

        Processes that were started by ranks and outlived them are killed, too.
        """
        assert self._server is not None
        assert self._spec is not None
        self._server.wait(None)
        self._server = None
        kill_marked(self._spec.directory)
        shared_memory.remove_all(self._spec.directory)
        self._mux.send(ServerEnded(self._number, tail(server_log_path(self._spec.directory, self._spec.server))))

    def _open(self, name: str) -> StreamTarget:
        """Return the target of a stream that the driver opens; raise OSError if there is no such target."""
        if name == SERVER and self._stream is not None:
            stream, self._stream = self._stream, None
            return StreamTarget(stream)
        if self._spec is None:
            raise FileNotFoundError(name)
        if name == ASK:
            ours, theirs = socket.socketpair()
            call = Connection(theirs.detach())
            args = call, self._spec.directory
            threading.Thread(target=answer, args=args, name="accel-inspector", daemon=True).start()
            return StreamTarget(ours)
        named = named_rank(name)
        if named is None:
            raise FileNotFoundError(name)
        world, rank, pid = named
        return StreamTarget(unix_sockets.connect(socket_path(self._spec.directory, world, rank)), prctl.end_of(pid))

    def close(self) -> None:
        """Wait for the fork server, which ends since its connection is closed, and remove all that is left."""
        if self._stream is not None:
            self._stream.close()
        if self._server is not None and not self._server.wait(TIMEOUT):
            self._server.kill_tree()
            self._server.wait(None)
        self._lease_agent.close()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._spec is not None:
            kill_marked(self._spec.directory)
            shared_memory.remove_all(self._spec.directory)
            shutil.rmtree(self._spec.directory, ignore_errors=True)


def _when_ended(server: OwnServer, mux: TcpMux, call: Callable[[], None]) -> None:
    """Call `call` in the thread of `mux` when `server` has ended."""
    end = prctl.end_of(server.process.pid)
    if end is not None:
        mux.watch(end, call)
        return
    # Without a pidfd, a thread waits for the server, and closes the write end of a pipe when the server has ended.
    source, target = os.pipe()

    def wait() -> None:
        server.wait(None)
        with contextlib.suppress(OSError):
            os.close(target)

    mux.watch(source, call)
    threading.Thread(target=wait, daemon=True).start()
