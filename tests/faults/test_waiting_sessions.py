"""Tests of sessions that wait for devices, or give idle ones up, and of those that lose a lock file or ``/proc``."""

from __future__ import annotations

import re
import signal

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

pytestmark = pytest.mark.usefixtures("without_torch")

CONFTEST = """
from pytest_accel.pool import pool

pool.WAITING_SHOWN_AFTER = 0.0
pool.WAITING_SHOWN_AGAIN = 0.2
pool._TICK_INTERVAL = 0.1
"""
SINCE = r"since (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d"


def test_the_xdist_controller_shows_for_which_devices_tests_wait(suite: BackgroundSuite) -> None:
    suite.write("conftest.py", CONFTEST)
    suite.write(
        "test_both.py",
        """
        import threading

        import pytest


        @pytest.mark.devices(3)
        @pytest.mark.parametrize("number", range(2))
        def test_both(number):
            threading.Event().wait()
        """,
    )
    session = suite.start("-n2", "--dist=each", "-o", "accel_schedule=off", "-q", "--accel=sim:4")
    waits = "3 sim devices: sim-0, sim-1, sim-2 are held"
    pattern = (
        rf"accel: test_both\.py::test_both\[0\] waits for {waits} by "
        rf"pid \d+ \(\S+\) for test_both\.py::test_both\[0\] {SINCE}"
    )
    session.wait_for_line(rf"^{pattern} \(for \d+ s now\)$")
    session.process.send_signal(signal.SIGINT)
    run = session.finish()
    assert run.ret == pytest.ExitCode.INTERRUPTED
    assert re.search(rf"^{pattern}$", run.text, re.MULTILINE)


def test_a_session_gets_devices_that_are_idle_in_another(suite: BackgroundSuite) -> None:
    suite.write(
        "test_suite.py",
        """
        import pytest
        from tests.inner import note, wait_for


        @pytest.mark.devices(4)
        def test_all():
            pass


        def test_idle():
            note("idle", "here")
            wait_for("go on")


        @pytest.mark.devices(4)
        def test_all_again():
            pass
        """,
    )
    first = suite.start("--accel=sim:4,shared")
    suite.read("idle")
    # An idle world of the first session holds all devices.
    second = suite.run("--accel=sim:4,shared", "-k", "test_all and not again", "--accel-wait=60")
    second.expect({"test_all": "PASSED"})
    assert first.process.poll() is None
    suite.write("go on", "")
    first.finish().expect(dict.fromkeys(("test_all", "test_idle", "test_all_again"), "PASSED"))


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
