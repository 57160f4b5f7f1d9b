"""Tests of processes that a session cannot kill: it goes on, names them, and ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.background_suite import BackgroundSuite, has_ended
from tests.deadline import eventually

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or os.getuid() != 0, reason="needs root on Linux, to start processes of other users"
    ),
    pytest.mark.usefixtures("without_torch"),
]

_PYTEST_WITHOUT_CAP_KILL = (
    sys.executable,
    "-c",
    "import ctypes, os, sys\n"
    "assert ctypes.CDLL(None).prctl(24, 5, 0, 0, 0) == 0  # PR_CAPBSET_DROP, CAP_KILL\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'pytest', *sys.argv[1:]])",
)
"""The command of a session that may not kill processes of other users, although root has started it."""


@pytest.fixture(autouse=True)
def end_process(suite: BackgroundSuite) -> Iterator[None]:
    """Kill the process whose id is in the file ``left``, before `suite` checks that nothing is left."""
    yield
    if (suite.path / "left").exists():
        left = psutil.Process(int(suite.read("left")))
        left.kill()
        eventually("the process to end", lambda: has_ended(left))


def test_the_session_goes_on_and_names_the_process(suite: BackgroundSuite) -> None:
    suite.write("pytest.ini", "[pytest]\naccel = sim:2,shared\naccel_wait = 60\n")
    suite.write(
        "test_it.py",
        """
        import subprocess, pytest
        @pytest.mark.devices(1)
        def test_leaves_a_process():
            left = subprocess.Popen(["sleep", "1000"], user="nobody")
            with open("left", "w") as file:
                print(left.pid, file=file)

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_on_the_cpu(): pass

        @pytest.mark.devices(1)
        def test_on_the_other_device(): pass

        @pytest.mark.devices(2)
        def test_on_both_devices(): pass
        """,
    )
    run = suite.start(program=_PYTEST_WITHOUT_CAP_KILL).finish()
    process = f"process {suite.read('left')} (sleep 1000; user nobody, sleeping)"
    run.expect(
        {
            "test_leaves_a_process": "PASSED",
            "test_on_the_cpu": "PASSED",
            "test_on_the_other_device": "PASSED",
            "test_on_both_devices": "PASSED",  # A program that a test has executed has no lock of its devices.
        }
    )
    assert f"left process {suite.read('left')} running (sleep 1000)" in run.text
    assert f"{process} could not be killed" in run.text


def test_a_launched_script_ends_although_a_process_of_it_does_not(suite: BackgroundSuite) -> None:
    suite.write(
        "script.py",
        """
        import subprocess

        with open("left", "w") as file:
            print(subprocess.Popen(["sleep", "1000"], user="nobody").pid, file=file)
        """,
    )
    suite.write(
        "test_it.py",
        """
        def test_launch(launch, pytestconfig):
            result = launch("script.py", launcher="python")
            pid = (pytestconfig.rootpath / "left").read_text().strip()
            assert f"processes that cannot be killed: {pid}" in result.stderr
        """,
    )
    run = suite.start(program=_PYTEST_WITHOUT_CAP_KILL).finish()
    run.expect({"test_launch": "PASSED"})
