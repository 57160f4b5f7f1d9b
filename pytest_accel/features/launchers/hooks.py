"""Calls of the kernel for sessions whose processes a launcher has started, and for the launchers of marks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_accel.core import launcher_env
from pytest_accel.core.stash_keys import LAUNCHED
from pytest_accel.features.launchers.launched_session import LaunchedSession

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
    from pytest_accel.features.launchers.hooks import LauncherHooks

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


class LauncherHooks:
    """The hooks of a session under a launcher; registered in rank 0 only, which is the driver."""

    def __init__(self, config: pytest.Config, launched: LaunchedSession) -> None:
        """Raise ``pytest.UsageError`` if xdist is to distribute the tests."""
        self._launched = launched
        self._session: pytest.Session | None = None
        count = getattr(config.option, "numprocesses", None)
        if count or getattr(config.option, "tx", None):
            launcher = launched.process.launcher
            launched.end(int(pytest.ExitCode.USAGE_ERROR))
            raise pytest.UsageError(
                f"-n {count or '(xdist)'} under {launcher}: use only one of the two. {launcher} without -n runs each "
                f"test in the ranks that it has started; pytest -n {count or 'N'} without {launcher} distributes the "
                "tests over workers, whose ranks the plugin starts by itself"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        self._launched.on_lost = self._fail_session
        self._launched.handle_sigterm()
        if self._launched.loss is not None:
            self._fail_session(self._launched.loss)

    def _fail_session(self, text: str) -> None:
        assert self._session is not None
        self._session.shouldfail = text

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._launched.end(int(self._session.exitstatus) if self._session is not None else 0)
