"""Call of the kernel: the cluster of ``--accel-cluster``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from pytest_accel.leases.shared_folder import PlaceError

if TYPE_CHECKING:
    from pytest_accel.features.ray.ray_cluster import RayCluster
    from pytest_accel.session import AccelSession


def pytest_accel_connect_cluster(session: AccelSession) -> RayCluster:
    """Connect to the cluster. Raise ``pytest.UsageError`` if that is not possible."""
    if find_spec("ray") is None or find_spec("zmq") is None:
        raise pytest.UsageError("--accel-cluster ray needs Ray and pyzmq: pip install 'pytest-accel[ray]'")
    from pytest_accel.features.ray.ray_cluster import RayCluster

    try:
        return RayCluster(session.settings, session.own_machine, str(session.config.rootpath))
    except PlaceError as error:
        raise pytest.UsageError(f"--accel-cluster {session.settings.cluster}: {error}") from None
