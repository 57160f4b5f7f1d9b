"""Tests of the locks of devices in ranks, which inherit them by way of the fork server."""

from __future__ import annotations

import signal
import sys

import psutil
import pytest

from tests.background_suite import BackgroundSuite, has_ended, suite
from tests.deadline import eventually

__all__ = ["suite"]

_TESTS = """
    import os
    import signal
    import subprocess
    import time
    from pathlib import Path

    import pytest


    def fork_and_wait():
        program = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if (child := os.fork()) == 0:
            os.setsid()
            signal.pause()
        Path("left").write_text(f"{child} {program.pid}\\n")
        signal.pause()


    @pytest.mark.devices(1)
    def test_forks():
        fork_and_wait()


    @pytest.mark.devices(1)
    @pytest.mark.distributed(1, init=False, env={"VARIABLE": "set"})
    def test_forks_in_a_new_interpreter():
        assert os.environ["VARIABLE"] == "set"
        fork_and_wait()


    @pytest.mark.devices(1)
    def test_device():
        pass


    @pytest.mark.distributed(1, kind="cpu", init=False)
    def test_on_the_cpu():
        Path("here").write_text("here\\n")
        while not Path("go").exists():
            time.sleep(0.02)
    """


@pytest.fixture(autouse=True)
def _tests(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write("pytest.ini", "[pytest]\naccel = sim:1,shared\n")
    suite.write("test_it.py", _TESTS)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not kill the ranks of a dead server")
@pytest.mark.parametrize("test", ["test_forks", "test_forks_in_a_new_interpreter"])
def test_a_device_stays_locked_while_a_fork_of_a_killed_session_lives(suite: BackgroundSuite, test: str) -> None:
    """A program that a rank has executed has no lock."""
    session = suite.start(f"test_it.py::{test}")
    child, program = (psutil.Process(int(pid)) for pid in suite.read("left").split())
    server, controller, rank = session.fork_server(), psutil.Process(session.process.pid), child.parent()
    assert rank is not None
    for number in (signal.SIGSTOP, signal.SIGKILL):  # Neither notices the end of the other.
        for process in (server, controller):
            process.send_signal(number)
    session.process.wait()
    eventually("the rank to end, which had the lock, too", lambda: has_ended(server) and has_ended(rank))
    waits = suite.run("test_it.py::test_device", "--accel-wait=0")
    waits.expect({"test_device": "ERROR"})
    why = f"no devices came free within 0 s (--accel-wait)\nsim-0 is held by process {child.pid} ("
    assert why in waits.failure("test_device")
    child.kill()
    suite.run("test_it.py::test_device", "--accel-wait=60").expect({"test_device": "PASSED"})
    assert program.is_running()
    program.kill()


def test_a_later_world_does_not_have_the_locks_of_an_earlier_one(suite: BackgroundSuite) -> None:
    session = suite.start("-k", "test_device or test_on_the_cpu")
    suite.read("here")
    suite.run("-k", "test_device", "--accel-wait=60").expect({"test_device": "PASSED"})
    suite.write("go", "")
    session.finish().expect({"test_device": "PASSED", "test_on_the_cpu": "PASSED"})
