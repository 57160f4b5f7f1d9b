"""Call of the kernel: the cluster of ``--accel-cluster``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_accel.features.ray.ray_session import RaySession
from pytest_accel.pool.starter import PlaceError

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


def pytest_accel_connect_cluster(session: AccelSession) -> RaySession:
    """Connect to the cluster. Raise ``pytest.UsageError`` if that is not possible."""
    try:
        return RaySession(session.settings, session.own_machine, str(session.config.rootpath))
    except PlaceError as error:
        raise pytest.UsageError(f"--accel-cluster {session.settings.cluster}: {error}") from None
