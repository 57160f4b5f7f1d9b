"""Calls of the kernel: sessions whose processes a launcher has started, and the launchers of marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_accel.core import launcher_env
from pytest_accel.core.stash_keys import LAUNCHED

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import RLock

    from pytest_accel.core.session_spec import SessionSpec
    from pytest_accel.core.world_spec import WorldSpec
    from pytest_accel.features.launchers.mpi import MpiJob
    from pytest_accel.forkserver.server_client import ServerCallbacks
    from pytest_accel.session import AccelSession


def start(early_config: pytest.Config, args: list[str]) -> None:
    """Meet the other processes. In all of them but rank 0, raise ``SystemExit`` when the session has ended."""
    from pytest_accel.features.launchers import launched_session

    process = launcher_env.find_here()
    assert process is not None
    early_config.stash[LAUNCHED] = launched_session.enter(early_config, args, process)


def configure(session: AccelSession) -> None:
    from pytest_accel.features.launchers.launcher_hooks import LauncherHooks

    config = session.config
    config.pluginmanager.register(LauncherHooks(config, config.stash[LAUNCHED]), "accel-launcher")


def start_job(
    spec: SessionSpec,
    callbacks: ServerCallbacks,
    lock: RLock,
    launcher: str,
    world: WorldSpec,
    on_end: Callable[[], None],
) -> MpiJob:
    from pytest_accel.features.launchers.mpi import MpiJob

    return MpiJob(spec, callbacks, lock, launcher, world, on_end)


def why_no_launcher(launcher: str) -> str | None:
    from pytest_accel.features.launch.launch_api import missing

    return missing(launcher)
