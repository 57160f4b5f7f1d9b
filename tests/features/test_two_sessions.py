"""Tests of two sessions that run at the same time and use the same devices of one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_accel.leases.shared_folder import lock_path
from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")


def test_a_session_gets_devices_that_are_idle_in_another(suite: Suite) -> None:
    suite.write(
        "test_suite.py",
        """
        import sys

        import pytest


        @pytest.mark.devices(4)
        def test_all():
            pass


        def test_idle():
            print("idle", flush=True)
            assert sys.stdin.readline() == "go on\\n"


        @pytest.mark.devices(4)
        def test_all_again():
            pass
        """,
    )
    suite.write("pytest.ini", "[pytest]\naccel = sim:4,shared\n")
    command = [sys.executable, "-m", "pytest", "-p", "accel", "-s", "-v"]
    with subprocess.Popen(
        command, cwd=suite.path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as first:
        try:
            assert first.stdin is not None
            assert first.stdout is not None
            lines: list[str] = []
            while not lines or "idle\n" not in lines[-1].split(" "):
                lines.append(first.stdout.readline())
                assert lines[-1], "".join(lines)
            # An idle world of the first session holds all devices.
            second = suite.run("-k", "test_all and not again", "--accel-wait=20")
            assert second.result("test_all") == "PASSED"
            assert first.poll() is None
            text, _ = first.communicate("go on\n")
        finally:
            first.kill()
    assert first.returncode == 0, "".join([*lines, text])
    assert "3 passed" in text


def test_what_another_user_puts_in_place_of_lock_files_holds_these_devices(suite: Suite) -> None:
    folder = Path(os.environ["PYTEST_ACCEL_LOCK_DIR"])
    folder.mkdir(mode=0o700)
    paths = [lock_path(folder, f"sim-{number}") for number in range(3)]
    paths[0].mkdir()
    os.mkfifo(paths[1])
    paths[2].symlink_to("/dev/zero")
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.devices(1)
        def test_free(accel):
            assert [device.id for device in accel.devices] == ["sim-3"]


        @pytest.mark.distributed(2, init=False)
        @pytest.mark.devices(2)
        def test_held(): ...
        """,
    )
    run = suite.run("--accel=sim:4,shared", "--accel-wait=0")
    run.expect({"test_free": "PASSED", "test_held": "ERROR"})
    for path, what in zip(paths, ("drwxr-xr-x", "prw-r--r--", "lrwxrwxrwx"), strict=True):
        device = path.stem.removeprefix("pytest-accel-")
        about = f"{device} is held by {path}, which is no lock file (its mode is {what}, and not -rw-rw-rw-)"
        assert about in run.failure("test_held")
