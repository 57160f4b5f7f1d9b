"""Tests of the protection of folders against other users, also in containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="needs root on Linux, to be another user"
)

_CODE = """
import sys
from pytest_accel.core.session_folder import is_trusted_owner
print(is_trusted_owner(int(sys.argv[1])))
"""
OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


def trusts(uid: int, *prefix: str) -> str:
    """Return whether a process trusts the owner `uid`, as it prints this; the command `prefix` starts it."""
    command = [*prefix, sys.executable, "-c", _CODE, str(uid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@needs_root
def test_the_machines_root_is_trusted_from_within_a_user_namespace() -> None:
    unknown = int(OVERFLOW_UID.read_text())
    assert trusts(unknown) == "False"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-U", "-r", "-m", "true"], check=False).returncode:
        pytest.skip("no user namespace can be made here")
    assert trusts(unknown, "unshare", "-U", "-r", "-m") == "True"
    assert trusts(1002, "unshare", "-U", "-r", "-m") == "False"
