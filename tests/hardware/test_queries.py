"""Tests of the function that reads for which devices torch was built, without importing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pytest_accel.hardware.queries import versions


@pytest.mark.parametrize(
    ("text", "builds"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", set()),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", {"cuda"}),
        ("cuda = None\nhip = '6.4.43482-0f2d60242'\nrocm: Optional[str] = '6.4.1'\n", {"hip"}),
        ("xpu: Optional[str] = '20250100'\n", {"xpu"}),
        ("", set()),
    ],
)
def test_the_version_file_names_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, builds: set[str]
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert versions() == {}
    (tmp_path / "torch/version.py").write_text(text)
    assert versions().keys() == builds


def test_the_result_agrees_with_torch_which_is_not_imported() -> None:
    script = """
import sys
from pytest_accel.hardware.queries import versions
found = versions().keys()
assert "torch" not in sys.modules
import torch
assert found == {name for name in ("cuda", "hip", "xpu") if getattr(torch.version, name, None)}, found
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_stub_that_a_suite_has_put_in_the_place_of_torch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = versions()
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # Its __spec__ is None.
    assert versions() == expected
