"""Tests of two sessions that run at the same time and use the same devices of one machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
