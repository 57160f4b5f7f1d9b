"""Calls of the kernel for sessions whose processes a launcher has started, and for the launchers of marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core import launcher_env
from pytest_accel.core.stash_keys import LAUNCHED, MARKED, SESSION
from pytest_accel.core.units import count_text
from pytest_accel.features.launchers.launched_session import LaunchedSession

if TYPE_CHECKING:
    from pytest_accel.features.launchers.mpi import MpiStarter
    from pytest_accel.session import AccelSession


def pytest_accel_start(early_config: pytest.Config, args: list[str]) -> None:
    """Meet the other processes. In all of them but rank 0, raise ``SystemExit`` when the session has ended."""
    from pytest_accel.features.launchers import launched_session

    process = launcher_env.find_here()
    assert process is not None
    early_config.stash[LAUNCHED] = launched_session.enter(early_config, args, process)


def pytest_accel_configure(session: AccelSession) -> None:
    config = session.config
    config.pluginmanager.register(LauncherHooks(config, config.stash[LAUNCHED]), "accel-launcher")


def pytest_accel_job_starter() -> type[MpiStarter]:
    from pytest_accel.features.launchers.mpi import MpiStarter

    return MpiStarter


def pytest_accel_why_no_launcher(launcher: str) -> str | None:
    from pytest_accel.features.launch.launch_commands import missing

    return missing(launcher)


class LauncherHooks:
    """The hooks of a session under a launcher; registered in rank 0 only, which is the driver."""

    def __init__(self, config: pytest.Config, launched: LaunchedSession) -> None:
        """Raise ``pytest.UsageError`` if xdist is to distribute the tests."""
        self._launched = launched
        self._session: pytest.Session | None = None
        self._strict: bool = config.stash[SESSION].settings.strict
        self._ran_once: set[str] = set()
        """The node ids of the tests without a mark that this process has run."""
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

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fail a test without a mark under ``--accel-strict``, unless a mark skips it: that hook comes first."""
        if self._strict and MARKED not in item.stash:
            process = self._launched.process
            pytest.fail(
                f"the test has no mark, so it would run once, not in the {process.size} processes that "
                f"{process.launcher} has started (--accel-strict): add @pytest.mark.distributed({process.size}), or "
                "@pytest.mark.distributed(1) if one process is enough",
                pytrace=False,
            )

    @pytest.hookimpl
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if MARKED not in item.stash:
            self._ran_once.add(item.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._ran_once:
            count, process = count_text(len(self._ran_once), "test"), self._launched.process
            terminalreporter.section(f"accel: tests under {process.launcher}", sep="-")
            terminalreporter.write_line(f"{count} without a mark ran once, not in {process.size} processes")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._launched.end(int(self._session.exitstatus) if self._session is not None else 0)
