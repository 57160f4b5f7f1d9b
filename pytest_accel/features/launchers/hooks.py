"""Calls of the kernel for sessions whose processes a launcher has started, and for the launchers of marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_accel.core import launcher_env
from pytest_accel.core.stash_keys import LAUNCHED

if TYPE_CHECKING:
    from pytest_accel.features.launchers.mpi import MpiStarter
    from pytest_accel.pool.starter import LocalStarter, StarterReports
    from pytest_accel.session import AccelSession


def pytest_accel_start(early_config: pytest.Config, args: list[str]) -> None:
    """Meet the other processes. In all of them but rank 0, raise ``SystemExit`` when the session has ended."""
    from pytest_accel.features.launchers import launched_session

    process = launcher_env.find_here()
    assert process is not None
    early_config.stash[LAUNCHED] = launched_session.enter(early_config, args, process)


def pytest_accel_configure(session: AccelSession) -> None:
    session.config.stash[LAUNCHED].configure(session.config)


def pytest_accel_job_starter(here: LocalStarter, reports: StarterReports) -> MpiStarter:
    from pytest_accel.features.launchers.mpi import MpiStarter

    return MpiStarter(here, reports)


def pytest_accel_why_no_launcher(launcher: str) -> str | None:
    from pytest_accel.features.launch.launch_commands import missing

    return missing(launcher)
