"""Tests of `pytest_accel.core.interpreter`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_accel.core.interpreter import find_program, python_command

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


def test_programs_beside_the_interpreter_come_before_those_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("venv/python", "venv/tool", "path/tool", "path/other"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_program("tool") == str(tmp_path / "venv" / "tool")
    assert find_program("other") == str(tmp_path / "path" / "other")
    assert find_program("absent") is None
