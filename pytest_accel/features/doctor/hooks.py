"""Call of the kernel: ``--accel-info``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.terminal_lines import write_section
from pytest_accel.features.doctor.info import look, table

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


def pytest_accel_configure(session: AccelSession) -> None:
    if not session.is_worker:
        session.config.pluginmanager.register(_InfoHooks(session), "accel-info")


class _InfoHooks:
    """Shows the devices in place of the collection."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        machine = self._session.own_machine
        write_section(session.config, None, [(table(machine, look(machine)), False)])
        session.items = []
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK
