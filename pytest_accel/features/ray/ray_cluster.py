"""A session's connection to a Ray cluster, through a helper process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from socket import SHUT_RDWR

from pytest_accel.core.interpreter import python_command, unmeasured
from pytest_accel.core.signals import signal_name
from pytest_accel.core.truncation import read_end
from pytest_accel.features.launchers.agent_client import EnvironmentChanges
from pytest_accel.features.ray.cluster_starter import ClusterStarter
from pytest_accel.features.ray.ray_messages import Connected, HelperFailed
from pytest_accel.features.ray.ray_resources import RayMachine
from pytest_accel.hardware.inventory import Machine, parse_kind
from pytest_accel.leases.shared_folder import PlaceError
from pytest_accel.messages import unix_sockets
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.messages.struct_messages import decode
from pytest_accel.messages.unix_sockets import Connection, socket_of
from pytest_accel.pool.starter import LocalStarter, StarterReports
from pytest_accel.settings.options import Settings

_CONNECT_TIMEOUT = 60
"""Seconds in which the cluster must answer. Ray itself tries for half a minute to reach a head that does not answer."""
_CLOSE_TIMEOUT = 10.0
"""Seconds that the helper may take to give everything back to Ray. After that it is killed.

Ray then takes everything back by itself, some seconds later.
"""
_TAIL = 1_000
"""Number of bytes at the end of the helper's output that are shown if it ends: the last error of Ray's native code."""


class RayCluster:
    """The Ray cluster on which a session runs its tests. The `AccelSession` of the controller owns it."""

    def __init__(self, settings: Settings, own: Machine, rootdir: str) -> None:
        """Connect to the cluster of ``--accel-cluster``; raise :class:`PlaceError` if that is not possible.

        `own` is this machine. `rootdir` is the suite's root directory, with the same files on all machines.
        """
        self.settings = settings
        self.changes = EnvironmentChanges()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 The helper writes to it as long as it runs.
        self._process, self.connection = self._start((settings.cluster or "").partition(":")[2] or "auto", rootdir)
        try:
            found = self._connect()
        except BaseException:
            self.close()
            raise
        self.machine = RayMachine(parse_kind(settings.accel), found.nodes, own, can_scale=found.can_scale)

    def _start(self, address: str, rootdir: str) -> tuple[subprocess.Popen[bytes], Connection]:
        """Start the helper; return its process and the connection to it."""
        ours, theirs = unix_sockets.pair()
        unix_sockets.limit_writes(ours)
        arguments = f"{theirs.fileno()}, {os.getpid()}, {address!r}, {rootdir!r}"
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

    def _connect(self) -> Connected:
        """Wait until the helper is connected."""
        if not unix_sockets.is_readable(self.connection.fileno(), _CONNECT_TIMEOUT):
            raise PlaceError(f"the Ray cluster did not answer within {_CONNECT_TIMEOUT} s{self._output()}")
        try:
            message: Connected | HelperFailed = decode(self.connection.recv_bytes(), Connected | HelperFailed)
        except (EOFError, OSError):
            raise PlaceError(
                f"the process that connects to the Ray cluster {self._wait()}; pytest's machine must be a node of the "
                "cluster (ray start --address=HOST:PORT)"
            ) from None
        if isinstance(message, HelperFailed):
            raise PlaceError(message.reason)
        return message

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> ClusterStarter:
        """Return the starter of ranks on the nodes of the cluster."""
        return ClusterStarter(spec, here, reports, self)

    def loss(self) -> str:
        """See `Cluster`."""
        return f"the connection to the Ray cluster is lost{self._output()}"

    def kill(self) -> None:
        """See `Cluster`."""
        self._process.kill()

    def close(self) -> None:
        """Give everything back to Ray, and end the helper. The pool must have been closed."""
        # The connection may also be open in a process that a test has forked.
        with self.connection, socket_of(self.connection) as end, suppress(OSError):
            end.shutdown(SHUT_RDWR)
        self._wait()
        self._log.close()

    def _wait(self, timeout: float = _CLOSE_TIMEOUT) -> str:
        """Wait for the exit of the helper, whose connection has ended, and return how it has ended."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired:  # Ray does not shut down in it.
            self._process.kill()
            status = self._process.wait()
        return (
            f"was killed by {signal_name(-status)}" if status < 0 else f"exited with status {status}"
        ) + self._output()

    def _output(self) -> str:
        """Return the end of the helper's output, after a colon; empty if there is none."""
        text = read_end(self._log.fileno(), longest=_TAIL).strip()
        return f":\n{text}" if text else ""
