"""Tests of variables that test files set after torch has read them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_accel.rank.late_variables import LateVariables


def test_variables_that_the_block_changes_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", ModuleType("torch")))
    monkeypatch.setenv("PYTORCH_JIT", "1")
    late = LateVariables()

    def found_with(**variables: str) -> list[str]:
        with late.watching("/suite/test_it.py"):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
        return [warning.message.partition(", which")[0] for warning in late.take_warnings(Path("/suite"))]

    assert found_with(PYTORCH_JIT="1", MINE="1") == []
    assert found_with(PYTORCH_JIT="0", TORCH_LOGS="dynamo") == [
        "test_it.py sets PYTORCH_JIT",
        "test_it.py sets TORCH_LOGS",
    ]
    assert found_with(PYTORCH_JIT="0") == []
    assert found_with(PYTORCH_JIT="1") == []
