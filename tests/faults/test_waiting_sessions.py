"""Tests of messages about waiting tests, and of sessions that lose a lock file, a thread, or ``/proc``."""

from __future__ import annotations

import re
import signal

import pytest

from tests.background_suite import BackgroundSession, BackgroundSuite
from tests.run import CAUSES

pytestmark = pytest.mark.usefixtures("without_torch")

CONFTEST = """
import time
from pathlib import Path

import pytest
from pytest_accel.pool import pool

pool.WAITING_SHOWN_AFTER = 0.0
pool.WAITING_SHOWN_AGAIN = 0.2
pool._TICK_INTERVAL = 0.1


@pytest.fixture
def wait_for():
    def wait(name):
        deadline = time.monotonic() + 100
        while not Path(name).exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait
"""
SINCE = r"since (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d"


def wait_for_line(session: BackgroundSession, pattern: str) -> re.Match[str]:
    """Wait for the first line of the session's output that starts with `pattern`, and return the match."""
    assert session.process.stdout is not None
    output = []
    for text in session.process.stdout:
        output.append(text)
        if (match := re.match(pattern, text)) is not None:
            return match
    pytest.fail("".join(["no such line in the output:\n", *output]), pytrace=False)


def test_the_xdist_controller_shows_for_which_devices_tests_wait(suite: BackgroundSuite) -> None:
    suite.write("conftest.py", CONFTEST)
    suite.write(
        "test_both.py",
        """
        import pytest


        @pytest.mark.devices(3)
        @pytest.mark.parametrize("number", range(2))
        def test_both(number, wait_for):
            wait_for("never")
        """,
    )
    session = suite.start("-n2", "--dist=each", "-o", "accel_schedule=off", "-q", "--accel=sim:4")
    waits = "3 sim devices: sim-0, sim-1, sim-2 are held"
    pattern = (
        rf"accel: test_both\.py::test_both\[0\] waits for {waits} by "
        rf"pid \d+ \(\S+\) for test_both\.py::test_both\[0\] {SINCE}"
    )
    wait_for_line(session, rf"{pattern} \(for \d+ s now\)$")
    session.process.send_signal(signal.SIGINT)
    run = session.finish()
    assert run.ret == pytest.ExitCode.INTERRUPTED
    assert re.search(rf"^{pattern}$", run.text, re.MULTILINE)


@pytest.mark.long
def test_a_lost_lock_ends_the_ranks_of_the_session(suite: BackgroundSuite) -> None:
    suite.write(
        "test_locks.py",
        """
        import fcntl
        import os
        import time
        from pathlib import Path

        import pytest

        FOLDER = Path(os.environ["PYTEST_ACCEL_LOCK_DIR"])
        LOCK = FOLDER / "pytest-accel-sim-0.lock"


        @pytest.mark.devices(1)
        def test_replaced():
            other = FOLDER / "other"
            with other.open("w") as file:
                other.chmod(0o666)
                fcntl.flock(file, fcntl.LOCK_EX)
                other.rename(LOCK)  # In one step, as a session that has found none could not be slower.
                time.sleep(600)


        @pytest.mark.devices(1)
        def test_next():
            pass


        def test_plain():
            pass
        """,
    )
    run = suite.run("--accel=sim:1,shared", CAUSES)
    run.expect({"test_replaced": "FAILED died: SIGKILL; rank 0", "test_next": "ERROR", "test_plain": "PASSED"})
    assert "the lock of sim-0 was lost, since its lock file was deleted or moved" in run.failure("test_next")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
