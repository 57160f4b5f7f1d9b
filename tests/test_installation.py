"""Tests of what pip does when the package is installed into an environment that exists: it replaces nothing there.

The environments are made up, and so are the packages that pip can find: each has metadata alone. Nothing is downloaded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.wheel import wheel

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
    _LOWEST: {"torch": "2.6.0+cu124", "numpy": "1.26.4", "filelock": "3.13.1", "pluggy": "1.5.0"},
    "torch 2.8 and pytest 9": {"torch": "2.8.0", "numpy": "2.2.6", "pytest": "9.0.1", "packaging": "25.0"},
    "torch 2.13": {"torch": "2.13.0+cpu", "numpy": "2.4.0", "filelock": "3.20.0", "pytest-xdist": "3.8.0"},
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
