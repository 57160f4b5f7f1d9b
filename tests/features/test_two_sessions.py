"""Two sessions of one machine, each a process of its own, over the same devices."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.features.conftest import Suite


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
            said: list[str] = []
            while not said or "idle\n" not in said[-1].split(" "):
                said.append(first.stdout.readline())
                assert said[-1], "".join(said)
            # The first one's world is warm, and on all devices. Unasked it would give them back after 30 s.
            second = suite.run("-k", "test_all and not again", "--accel-wait=20")
            assert second.word("test_all") == "PASSED"
            assert first.poll() is None
            text, _ = first.communicate("go on\n")
        finally:
            first.kill()
    assert first.returncode == 0, "".join([*said, text])
    assert "3 passed" in text
