"""Tests of `pytest_accel.core.interpreter`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_accel.core.interpreter import python_command

PLANTED = ("json", "linecache", "sitecustomize", "socket")
"""Modules that the program imports, and that Python itself may import before it."""


@pytest.mark.parametrize("path", [None, [entry for entry in sys.path if entry]], ids=["default", "given"])
def test_a_process_imports_nothing_from_the_current_folder(tmp_path: Path, path: list[str] | None) -> None:
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').close()\n")
    command = python_command("import json, socket, sys; print(json.dumps([sys.argv[1:], sys.path]))", "one", path=path)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    arguments, found = json.loads(done.stdout)
    assert (arguments, path is None or found == path) == (["one"], True)
    assert not (tmp_path / "imported").exists()
