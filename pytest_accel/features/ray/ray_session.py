"""A session's connection to a Ray cluster: its devices for planning, and its machines for the pool."""

from __future__ import annotations

from importlib.util import find_spec

from pytest_accel.features.ray.cluster_starter import ClusterStarter
from pytest_accel.features.ray.ray_client import RayCluster
from pytest_accel.features.ray.ray_resources import RayMachine
from pytest_accel.hardware.inventory import Machine, parse_kind
from pytest_accel.messages.session_spec import SessionSpec
from pytest_accel.pool.local_starter import LocalStarter
from pytest_accel.pool.starter import PlaceError, StarterReports
from pytest_accel.settings.options import Settings

_CONNECT_TIMEOUT = 60.0
"""Seconds in which the cluster must answer. Ray itself tries for half a minute to reach a head that does not answer."""


class RaySession:
    """The Ray cluster on which a session runs its tests. The `AccelSession` of the controller owns it."""

    def __init__(self, settings: Settings, own: Machine, rootdir: str) -> None:
        """Connect to the cluster of ``--accel-cluster``; raise :class:`PlaceError` if that is not possible.

        `own` is this machine. `rootdir` is the suite's root directory, with the same files on all machines.
        """
        if find_spec("zmq") is None:
            raise PlaceError("--accel-cluster ray needs pyzmq: pip install 'pytest-accel[ray]'")
        from pytest_accel.features.ray.cluster_machines import ClusterMachines

        self.machines = ClusterMachines(settings, rootdir)
        self._cluster = RayCluster((settings.cluster or "").partition(":")[2] or "auto", self.machines)
        self.machines.on_lost = self._on_lost
        try:
            self._cluster.connect(_CONNECT_TIMEOUT)
            self.machine = RayMachine(
                parse_kind(settings.accel), self._cluster.nodes, own, can_scale=self._cluster.can_scale
            )
        except BaseException:
            self.close()
            raise

    def starter(self, spec: SessionSpec, here: LocalStarter, reports: StarterReports) -> ClusterStarter:
        """Return the starter of ranks on the nodes of the cluster."""
        return ClusterStarter(spec, here, self.machines, reports, self._cluster)

    def close(self) -> None:
        """End the agents, give back all places, and disconnect. The pool must have been closed."""
        self.machines.close()
        self._cluster.close()

    def _on_lost(self, number: int, why: str) -> None:
        self._cluster.drop_machine(number)
