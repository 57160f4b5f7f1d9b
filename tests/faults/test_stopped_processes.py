"""Tests of processes that a signal has stopped (SIGSTOP): the session goes on without them, and ends."""

from __future__ import annotations

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

pytestmark = pytest.mark.usefixtures("without_torch")


def test_a_stopped_rank_does_not_block_the_driver_that_sends_it_a_long_message(suite: BackgroundSuite) -> None:
    suite.write(
        "conftest.py",
        """
        import os, signal
        from pathlib import Path
        from pytest_accel.messages import unix_sockets
        from tests.deadline import scaled

        unix_sockets.WRITE_TIMEOUT = round(scaled(2))  # Rank 0 must read in this time.

        def pytest_runtest_logfinish(nodeid):
            if nodeid.endswith("test_first") and "RANK" not in os.environ:  # In the driver.
                os.kill(int(Path("rank").read_text()), signal.SIGSTOP)
        """,
    )
    suite.write(
        "test_it.py",
        """
        import os, pytest
        from pathlib import Path
        from tests.deadline import scaled

        @pytest.mark.distributed(2, init=False)
        def test_first(rank):
            if rank == 1:
                Path("rank").write_text(str(os.getpid()))

        @pytest.mark.distributed(2, init=False, timeout=scaled(2))
        @pytest.mark.parametrize("value", [pytest.param(1, id="x" * 400_000)])
        def test_long(value): pass

        @pytest.mark.distributed(2, init=False)
        def test_last(): pass
        """,
    )
    run = suite.run("--tb=line", CAUSES)
    assert run.result("test_first") == run.result("test_last") == "PASSED"
    assert list(run.causes.values()) == ["hung: phase timeout; rank 1"]


@pytest.mark.long
def test_a_stopped_fork_server_is_replaced_and_does_not_delay_the_end_for_long(suite: BackgroundSuite) -> None:
    suite.write("pytest.ini", "[pytest]\naccel = sim:1,shared\naccel_wait = 100\n")
    suite.write(
        "conftest.py",
        """
        from pytest_accel.forkserver import client
        from pytest_accel.pool import worlds

        # Each server of this session is stopped, so nothing that these timeouts wait for comes.
        worlds._ANSWER_TIMEOUT = 3.0
        worlds.RETIRE_TIMEOUT = worlds._REPORTING_TIMEOUT = client._STOP_TIMEOUT = 1.0
        """,
    )
    suite.write(
        "test_it.py",
        """
        import os, pytest, signal, subprocess, time
        from tests.inner import hang_here

        @pytest.mark.distributed(1, init=False)
        def test_stops_the_server():
            os.kill(os.getppid(), signal.SIGSTOP)
            hang_here()
            time.sleep(1000)

        @pytest.mark.devices(1)
        def test_gets_the_device(): pass

        @pytest.fixture(scope="session")
        def process():
            yield subprocess.Popen(["sleep", "1000"], start_new_session=True)

        @pytest.mark.devices(1)
        def test_stops_the_last_server(process):
            os.kill(os.getppid(), signal.SIGSTOP)
        """,
    )
    run = suite.start("-p", "tests.late_driver").finish(timeout=150)
    run.expect(
        {
            "test_stops_the_server": "FAILED",
            "test_gets_the_device": "PASSED",
            "test_stops_the_last_server": "PASSED",
        }
    )
