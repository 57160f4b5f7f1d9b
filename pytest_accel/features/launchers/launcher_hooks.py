"""The pytest hooks of rank 0 under a launcher: they refuse xdist, react to lost processes, and end the agents."""

from __future__ import annotations

import pytest

from pytest_accel.features.launchers.launched_session import LaunchedSession


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
