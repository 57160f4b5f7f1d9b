"""A session's connection to a Ray cluster: starts the helper process, and reserves places through it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as ConnectTimeoutError
from traceback import format_exc

from pytest_accel.core import threads
from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.signals import signal_name
from pytest_accel.core.truncation import read_end
from pytest_accel.features.ray.cluster_machines import ClusterMachines
from pytest_accel.features.ray.cluster_starter import ClusterStarter
from pytest_accel.features.ray.ray_messages import (
    AgentEnded,
    AgentJoined,
    AgentNeeded,
    Connected,
    HelperFailed,
    PlaceAnswer,
    StartAgent,
    ToController,
    ToHelper,
)
from pytest_accel.features.ray.ray_resources import RayMachine
from pytest_accel.hardware.inventory import Machine, parse_kind
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode, encode
from pytest_accel.messages.unix_sockets import Connection
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import StarterReports
from pytest_accel.settings.options import Settings

_CONNECT_TIMEOUT = 60.0
"""Seconds in which the cluster must answer. Ray itself tries for half a minute to reach a head that does not answer."""
_CLOSE_TIMEOUT = 10.0
"""Seconds that the helper may take to give everything back to Ray. After that it is killed.

Ray then takes everything back by itself, some seconds later.
"""
_TAIL = 1_000
"""Number of bytes at the end of the helper's output that are shown if it ends: the last error of Ray's native code."""


class RayCluster:
    """The Ray cluster on which a session runs its tests. The `AccelSession` of the controller owns it.

    It is the `Cluster` of its starter, whose answers come in a thread of this object.
    """

    def __init__(self, settings: Settings, own: Machine, rootdir: str) -> None:
        """Connect to the cluster of ``--accel-cluster``; raise :class:`PlaceError` if that is not possible.

        `own` is this machine. `rootdir` is the suite's root directory, with the same files on all machines.
        """
        self.machines = ClusterMachines(settings, rootdir, self._joined, self._lost)
        self.on_answer: Callable[[PlaceAnswer | HelperFailed], None] = _ignore
        self._sending = threading.Lock()
        self._connected: Future[Connected] = Future()
        """Fails if the helper has ended before it was connected."""
        self._failure: str | None = None
        """Why no request can be met any more; None as long as the helper runs."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 The helper writes to it as long as it runs.
        self._process, self._connection = self._start((settings.cluster or "").partition(":")[2] or "auto")
        self._thread = threads.start(self._listen, "accel-ray")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            try:
                found = self._connected.result(_CONNECT_TIMEOUT)
            except ConnectTimeoutError:
                why = f"the Ray cluster did not answer within {_CONNECT_TIMEOUT:g} s{self._output()}"
                raise PlaceError(why) from None
            self.machine = RayMachine(parse_kind(settings.accel), found.nodes, own, can_scale=found.can_scale)
            undo.pop_all()

    def _start(self, address: str) -> tuple[subprocess.Popen[bytes], Connection]:
        """Start the helper; return its process and the connection to it."""
        ours, theirs = unix_sockets.pair()
        unix_sockets.limit_writes(ours)
        arguments = f"{theirs.fileno()}, {os.getpid()}, {address!r}"
        source = f"from pytest_accel.features.ray.ray_process import main; main({arguments})"
        with theirs:
            process = subprocess.Popen(
                python_command(source, path=sys.path),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=unmeasured(os.environ),
                cwd="/",  # Ray adds the working directory to sys.path on the nodes.
                start_new_session=True,  # Ctrl-C at the terminal must interrupt the driver only.
            )
        return process, Connection(ours.detach())

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> ClusterStarter:
        """Return the starter of ranks on the nodes of the cluster."""
        return ClusterStarter(spec, here, reports, self)

    def close(self) -> None:
        """End the agents, give everything back to Ray, and end the helper. The pool must have been closed."""
        self.machines.close()
        self._failure = self._failure or "the session has left the Ray cluster"
        # shutdown() instead of close(), because the thread may be waiting on the descriptor.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        if threads.end(self._thread):
            self._connection.close()
            self._log.close()

    def send(self, message: ToHelper) -> str | None:
        """Send a message to the helper; return why the connection to the cluster is lost, or None."""
        with self._sending, contextlib.suppress(OSError):  # If the helper has ended, the thread reports that.
            try:
                self._connection.send_bytes(encode(message))
            except BlockingIOError:  # The helper does not read, and may have got a part of the message.
                self._process.kill()
        return self._failure

    def _joined(self, machine: int) -> None:
        self.send(AgentJoined(machine))

    def _lost(self, machine: int, why: str) -> None:
        self.send(AgentEnded(machine, why))

    # In the thread

    def _listen(self) -> None:
        """Handle the helper's messages until it ends; then report that."""
        try:
            while True:
                self._handle(decode(self._connection.recv_bytes(), ToController))
        except (EOFError, OSError):
            failure = self._end_text()
        except BaseException:
            failure = f"the thread that listens to Ray's helper has ended with an error:\n{format_exc()}"
        self._failure = self._failure or failure
        if not self._connected.done():
            self._connected.set_exception(PlaceError(self._failure))
        self.on_answer(HelperFailed(self._failure))

    def _handle(self, message: ToController) -> None:
        match message:
            case Connected():
                self._connected.set_result(message)
            case HelperFailed(reason):
                self._failure = self._failure or reason
            case AgentNeeded(machine, name, address):
                self.send(StartAgent(self.machines.expect(machine, name, address)))
            case AgentEnded(machine):
                self.machines.forget(machine)
            case _:
                self.on_answer(message)

    def _end_text(self) -> str:
        """Wait for the helper's exit, and return a message with the reason."""
        try:
            status = self._process.wait(_CLOSE_TIMEOUT)
        except subprocess.TimeoutExpired:  # The helper has closed the connection, but Ray does not shut down in it.
            self._process.kill()
            status = self._process.wait()
        end = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"
        if not self._connected.done():
            return (
                f"the process that connects to the Ray cluster {end}{self._output()}; pytest's machine must be a "
                "node of the cluster (ray start --address=HOST:PORT)"
            )
        return f"the connection to the Ray cluster is lost: the process that held it {end}{self._output()}"

    def _output(self) -> str:
        """Return the end of the helper's output, after a colon; empty if there is none."""
        text = read_end(self._log.fileno(), longest=_TAIL).strip()
        return f":\n{text}" if text else ""


def _ignore(answer: PlaceAnswer | HelperFailed) -> None:
    pass
