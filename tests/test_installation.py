"""Test of `pip install pytest-accel`: the tutorial runs in an environment that has packages of this one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pytest_accel
from tests.wheel import ROOT, wheel

__all__ = ["wheel"]


def link_requirements(wheel: Path, extras: frozenset[str], packages: Path) -> None:
    """Link what `wheel` requires with `extras`, directly or not, from this environment to the folder `packages`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    waiting = [(Requirement(text), extras) for text in required] + [(Requirement("numpy"), frozenset[str]())]
    linked = set()
    while waiting:
        one, of = waiting.pop()
        if one.name in linked or (one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in {*of, ""})):
            continue
        linked.add(one.name)
        if one.name == "pytest-accel":
            continue
        try:
            found = distribution(one.name)
        except PackageNotFoundError:
            pytest.skip(f"needs {one.name}")
        waiting += [(Requirement(text), frozenset(one.extras)) for text in found.requires or ()]
        for entry in {file.parts[0] for file in found.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            if not (packages / entry).exists():
                (packages / entry).symlink_to(str(found.locate_file(entry)))


@pytest.mark.long
def test_the_tutorial_runs_after_the_documented_installation(wheel: Path, tmp_path: Path) -> None:
    """The wheel is in a folder that pip searches, as it searches an index; its requirements are there already."""
    pytest.importorskip("pip")
    venv.create(tmp_path / "new", symlinks=True)
    (packages,) = tmp_path.glob("new/lib/python*/site-packages")
    link_requirements(wheel, frozenset({"torch"}), packages)
    text = (ROOT / "docs" / "tutorial" / "first-test.md").read_text(encoding="utf-8")
    (wanted,) = re.findall(r"^\$ pip install (.*)$", text, re.MULTILINE)
    assert f"\n$ pip install {wanted}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    installed = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"),
            *("--python", str(tmp_path / "new"), "install", "--no-index", "--find-links", str(wheel.parent)),
            *shlex.split(wanted),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    assert f"Successfully installed pytest-accel-{pytest_accel.__version__}\n" in installed.stdout

    files = re.findall(r"Write\s`(\w+\.py)`:\n\n```python(?: fails)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    suite = tmp_path / "suite"
    suite.mkdir()
    for name, block in files:
        (suite / name).write_text(block, encoding="utf-8")
    ignored = ("PYTEST", "PYTHON", "COV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ignored)}
    done = subprocess.run(
        [str(tmp_path / "new" / "bin" / "python"), "-m", "pytest", "--accel", "sim:2"],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 4 passed in" in done.stdout.splitlines()[-1]
    assert "FAILED test_save.py::test_save - rank 1: OSError: no space left" in done.stdout
