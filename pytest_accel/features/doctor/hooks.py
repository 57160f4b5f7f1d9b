"""``--accel-info``: hooks of pytest that show the devices in place of the collection."""

from __future__ import annotations

import pytest

from pytest_accel.core.stash_keys import SESSION
from pytest_accel.core.terminal_lines import write_section
from pytest_accel.features.doctor.info import look, table


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool:
    machine = session.config.stash[SESSION].own_machine
    write_section(session.config, None, [(table(machine, look(machine)), False)])
    session.items = []
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
