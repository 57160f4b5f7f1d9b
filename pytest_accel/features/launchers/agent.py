"""The agent of a launched process other than rank 0, or of a cluster's machine. Its fork server forks ranks.

The agent is not a rank itself. So the launcher sees no process exit when a rank dies or hangs, and the world can be
replaced as without a launcher. The agent prints nothing, except an error of its connection to the driver.

An agent on the driver's machine uses the session's folder. An agent on another machine has a folder of its own, and
leases devices of its machine for the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from msgspec import structs

from pytest_accel.core import prctl, session_folder, threads
from pytest_accel.core.kill import KILL_TIMEOUT, kill_marked
from pytest_accel.core.log import step
from pytest_accel.core.paths import server_log_path
from pytest_accel.core.truncation import tail
from pytest_accel.features.launchers.agent_messages import End, KillServer, ServerEnded, StartServer
from pytest_accel.features.launchers.lease_agent import LeaseAgent
from pytest_accel.forkserver.server_process import OwnServer, spawn_here
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.settings.machine import machine_for

_DRIVER_LOST = 1
"""Exit status of an agent whose driver has exited without sending `End`."""
_EXIT_TIMEOUT = 30.0
"""Seconds that a driver may take to exit after it has sent `End`, and a fork server after the loss of its driver."""


class AgentTransport(Protocol):
    """The agent's end of its connection to the driver.

    :meth:`send` may be called in any thread, the other methods only in the thread of :meth:`run`.
    """

    remote: bool
    """True if the driver is on another machine, and so neither its folder nor its processes are visible here."""
    clock: float
    """Seconds to add to this machine's clock to get the driver's."""

    def send(self, message: object) -> None:
        """Send `message` to the driver; no-op if the connection has ended."""

    def run(self, handle: Callable[[object], None]) -> str | None:
        """Call `handle` with each message until the connection ends; return an error that only this end knows."""

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Close `descriptor` and call `call`, in the thread of :meth:`run`, once `descriptor` becomes readable."""

    def connect_server(self, directory: str) -> socket.socket:
        """Return a fork server's end of its connection to the driver; called once for each `StartServer`.

        The ranks of the server listen in `directory`.
        """

    def expect_exit(self, driver: int, timeout: float) -> None:
        """Have :meth:`run` return once the driver, whose process id is `driver`, has exited, or after `timeout`."""

    def close(self) -> None:
        """Close the connection."""


def serve_driver(transport: AgentTransport) -> int:
    """Serve the driver until it exits; return the exit status for this process."""
    # The driver handles a Ctrl-C at the terminal. Ranks would inherit that a signal is ignored, but no handler.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)
    agent = _Agent(transport)
    try:
        return agent.run()
    finally:
        agent.close()


class _Agent:
    """The agent's state: its current fork server, the server's folder, and the exit status."""

    def __init__(self, transport: AgentTransport) -> None:
        self._transport = transport
        self._server: OwnServer | None = None
        self._number = 0
        """The number of the last server."""
        self._spec: SessionSpec | None = None
        """The session's data for the last server, with the folder that it uses."""
        self._status: int | None = None
        """The exit status that the driver has sent."""
        self._owns_folder = transport.remote
        self._lease_agent = LeaseAgent(transport.send, machine_for)

    def run(self) -> int:
        """Handle messages until the driver exits; return the exit status."""
        step("serves the driver")
        why = self._transport.run(self._handle)
        step("the connection to the driver has ended%s", "" if why is None else f": {why}")
        if why is not None:
            print(f"accel: the connection to the driver has ended: {why}", file=sys.stderr, flush=True)
        if self._status is None:
            # The driver's fork server removes the folder, but ranks of this agent may write files there afterwards.
            self._owns_folder = True
            return _DRIVER_LOST
        return self._status

    def _handle(self, message: object) -> None:
        if isinstance(message, StartServer):
            self._start(message)
        elif isinstance(message, KillServer):
            if self._server is not None and message.number == self._number:
                step("kills its fork server, as the driver wants")
                self._server.kill()
        elif isinstance(message, End):
            self._status = message.status
            step("the driver ends with status %d", message.status)
            # The driver exits first: a launcher that sees another exit status than 0 terminates all processes.
            self._transport.expect_exit(message.driver, _EXIT_TIMEOUT)
        else:
            self._lease_agent.handle(message)

    def _start(self, message: StartServer) -> None:
        self._number = message.number
        try:
            self._spec = self._own_spec(message) if self._transport.remote else message.spec
            with self._transport.connect_server(self._spec.directory) as end:
                self._server = spawn_here(self._spec, end, changed_environment(message.environment))
        except Exception as error:
            step("cannot start a fork server: %r", error)
            self._transport.send(ServerEnded(message.number, traceback.format_exc()))
        else:
            step("starts fork server %d: process %d", self._spec.server, self._server.process.pid)
            self._watch_server(self._server, message.number, self._spec)

    def _own_spec(self, message: StartServer) -> SessionSpec:
        """Return the session's data for a server on another machine than the driver's, with a new folder."""
        self._remove_folder()
        session_folder.remove_dead()
        directory = session_folder.create()
        shared = os.path.exists(message.token)
        basetemp = message.spec.basetemp if shared else os.path.join(directory, "tmp")
        clock = self._transport.clock
        return structs.replace(
            message.spec, directory=directory, basetemp=basetemp, remote=True, clock=clock, shared=shared
        )

    def _watch_server(self, server: OwnServer, number: int, spec: SessionSpec) -> None:
        """Have :meth:`_on_server_end` called once `server` has exited."""
        end = prctl.end_of(server.process.pid)
        if end is None:
            # Without a pidfd, a thread waits for the server, and closes the write end of a pipe when it has exited.
            end, write_end = os.pipe()

            def wait() -> None:
                server.wait(None)
                with contextlib.suppress(OSError):
                    os.close(write_end)

            threads.start(wait, "accel-wait")
        self._transport.watch(end, partial(self._on_server_end, server, number, spec))

    def _on_server_end(self, server: OwnServer, number: int, spec: SessionSpec) -> None:
        """Clean up after a fork server that has exited, and tell the driver. The next server may already run.

        On another machine than the driver's, processes that were started by ranks and outlived them are killed, too.
        """
        server.wait(KILL_TIMEOUT)
        step("fork server %d has exited: status %s", spec.server, server.process.returncode)
        if self._server is server:
            self._server = None
        log = ""
        if self._transport.remote:
            kill_marked(spec.directory)
            log = tail(server_log_path(spec.directory, spec.server))
        self._transport.send(ServerEnded(number, log))

    def close(self) -> None:
        """Wait for the fork server, which exits since its connection is closed, and clean up after it."""
        self._transport.close()
        if self._server is not None and not self._server.wait(_EXIT_TIMEOUT):
            self._server.kill()
            self._server.wait(KILL_TIMEOUT)
        self._lease_agent.close()
        step("ends")
        if self._owns_folder:
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._spec is None:
            return
        if self._transport.remote:
            kill_marked(self._spec.directory)
        session_folder.remove(self._spec.directory)


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return this process's environment with `changes`; None removes a variable."""
    environment = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in environment.items() if changes.get(name, "") is not None}
