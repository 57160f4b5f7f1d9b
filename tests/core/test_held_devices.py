"""Tests of the records by which a session finds the devices of the rank that it runs in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pytest_accel.core.held_devices import HeldDevices
from pytest_accel.core.kill import MARK, mark
from pytest_accel.core.paths import held_path

_ASK = """
import sys
from pytest_accel.core.held_devices import held_here
for line in sys.stdin:
    held = held_here()
    print(held and held.devices, flush=True)
"""


def test_only_a_record_of_an_own_folder_about_an_ancestor_grants_devices(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = Path(held_path(str(tmp_path), 0, 0))
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_ASK!r}])"]
    environment = {**os.environ, MARK: mark(str(tmp_path), 0)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as ancestor:

        def found() -> str:
            assert ancestor.stdin is not None
            assert ancestor.stdout is not None
            ancestor.stdin.write("\n")
            ancestor.stdin.flush()
            return ancestor.stdout.readline().strip()

        def write(rank: int) -> None:
            HeldDevices(rank, os.getpid(), "sim", ("sim-7",), {}, "/tmp", "/tmp/inner").write(str(tmp_path), 0, 0)

        assert found() == "None"
        write(ancestor.pid)
        assert found() == "('sim-7',)"
        write(os.getpid())
        assert found() == "None", "this process is no rank of the session in the folder"
        path.write_text("{")
        assert found() == "None"
        write(ancestor.pid)
        tmp_path.chmod(0o770)
        assert found() == "None", "others may write to the folder"
        tmp_path.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(tmp_path, 1002, -1)
            assert found() == "None", "the folder belongs to another user"
            os.chown(tmp_path, 0, -1)
