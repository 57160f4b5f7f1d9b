"""Tests of `pip install pytest-accel`: it replaces nothing in an environment that exists, and the tutorial runs then.

Nothing is downloaded. What is replaced is tested with environments that are made up, and so are the packages that pip
can find there: each has metadata alone. The tutorial runs in an environment that has packages of this one.
"""

from __future__ import annotations

import json
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
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import pytest_accel
from tests.wheel import ROOT, wheel

__all__ = ["wheel"]


INDEX = {
    "torch": ("99.0", "numpy>=99", "filelock>=99"),
    "numpy": ("99.0",),
    "filelock": ("99.0",),
    "pytest": ("99.0", "packaging>=20", "pluggy>=1.5"),
    "pytest-xdist": ("99.0", "execnet>=2.1", "pytest>=7"),
    "msgspec": ("99.0",),
    "nvidia-ml-py": ("99.0",),
    "psutil": ("99.0",),
    "tomli": ("99.0",),
    "packaging": ("99.0",),
    "pluggy": ("99.0",),
    "execnet": ("99.0",),
}
"""For each package that pip can find: the newest version, and its requirements."""

_LOWEST = "torch 2.6 and the lowest versions"
ENVIRONMENTS: dict[str, dict[str, str]] = {
    _LOWEST: {"torch": "2.6.0+cu124", "numpy": "1.26.4", "filelock": "3.30.0", "pluggy": "1.5.0"},
    "torch 2.13": {"torch": "2.13.0+cpu", "numpy": "2.4.0", "filelock": "4.2.0", "pytest-xdist": "3.8.0"},
    "a vendor's build of torch": {"torch": "2.3.0a0+40ec155e58.nv24.3", "numpy": "1.24.4", "psutil": "5.9.8"},
}


def make_wheel(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Write a wheel without modules."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        "METADATA": metadata(name, version, *requirements),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(f"{stem}.dist-info/{file}", text)


def metadata(name: str, version: str, *requirements: str) -> str:
    lines = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}")
    return "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requirements), ""])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with the wheels of `INDEX`."""
    folder = tmp_path_factory.mktemp("index")
    for name, (version, *requirements) in INDEX.items():
        make_wheel(folder, name, version, *requirements)
    return folder


def lowest_versions(wheel: Path) -> dict[str, str]:
    """Return the lowest version of each package that `wheel` requires."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    required = map(Requirement, headers.get_all("Requires-Dist", []))
    return {one.name: next(iter(one.specifier)).version for one in required if one.marker is None}


@pytest.mark.long(except_for=_LOWEST)
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_installation_replaces_nothing(environment: str, wheel: Path, index: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    there = (lowest_versions(wheel) if environment == _LOWEST else {}) | ENVIRONMENTS[environment]
    venv.create(tmp_path / "there")
    (packages,) = tmp_path.glob("there/lib/python*/site-packages")
    for name, version in there.items():
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(metadata(name, version))
    # Without the extra, any torch stays.
    extra = "[torch]" if Version(there["torch"]) in SpecifierSet(">=2.4", prereleases=True) else ""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"),
            *("--python", str(tmp_path / "there"), "install", "--dry-run", "--quiet", "--report", "-"),
            *("--no-index", "--find-links", str(index), f"pytest-accel{extra} @ {wheel.as_uri()}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    installed = {one["metadata"]["name"] for one in json.loads(done.stdout)["install"]}
    assert "pytest-accel" in installed
    assert installed & there.keys() == set()


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
