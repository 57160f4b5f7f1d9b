"""Tests of `pytest_accel.core.interpreter`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_accel.core.interpreter import find_program


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
