"""Test of `pip install pytest-accel`: the tutorial runs in an environment that has packages of this one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
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

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["wheel"]


def link_requirements(wheel: Path, extras: frozenset[str], packages: Path) -> None:
    """Link what `wheel` requires with `extras`, directly or not, from this environment to the folder `packages`."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    waiting = [(Requirement(text), extras) for text in [*required, "numpy", "hatchling"]]
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


def install_lines(folder: Path) -> list[str]:
    """Return the commands in pages, and the lines in files for CI, that install the plugin into a new environment."""
    pages = [folder / "README.md", *(folder / "docs").rglob("*.md")]
    lines = [
        line.strip()
        for file in (*pages, *(folder / "examples" / "ci").rglob("*.*"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if file not in pages or line.startswith("$ ")
    ]
    extra = re.compile(r"pip install ['\"]pytest-accel\[(?!torch)")  # For an environment that has the plugin.
    return [line for line in lines if re.search(r"pip.install.*pytest.accel", line) and not extra.search(line)]


def test_one_command_switches_all_lines_that_install(tmp_path: Path) -> None:
    """The lines install from a clone or a wheel until the project is published, and then from the index."""
    files = ["README.md", "docs", "examples", "pyproject.toml", "CITATION.cff", ".ci"]
    done = subprocess.run(["git", "ls-files", *files], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in done.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    local = re.compile(
        r'install "\.\./pytest-accel\[torch\]" numpy$|install (-e "\.\[test\]" )?(/?)third_party/pytest_accel-\*\.whl'
    )
    before = install_lines(tmp_path)
    assert len(before) == 14
    is_published = "[project.urls]" in (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    assert [line for line in before if bool(local.search(line)) == is_published] == []
    if is_published:
        return
    for command in (["git", "init", "-q"], ["git", "add", "-A"], [".ci/published", "owner/pytest-accel"]):
        subprocess.run(command, cwd=tmp_path, check=True)
    index = re.compile(r'install(_?\("| "|( -e "\.\[test\]")? )pytest-accel')
    after = install_lines(tmp_path)
    assert len(after) == 14
    assert [line for line in after if not index.search(line)] == []
    texts = [
        path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.*") if path.suffix in (".md", ".yml", ".py")
    ]
    assert [text for text in texts if "not on PyPI" in text or "third_party" in text] == []
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Issues"] == "https://github.com/owner/pytest-accel/issues"
    assert "\nrepository-code: https://github.com/owner/pytest-accel\n" in (tmp_path / "CITATION.cff").read_text()


@pytest.mark.long
def test_the_tutorial_runs_after_the_documented_installation(wheel: Path, tmp_path: Path) -> None:
    """The clone, or a wheel that pip finds as in an index, is in the folder; the requirements are there already."""
    pytest.importorskip("pip")
    venv.create(tmp_path / "new", symlinks=True)
    (packages,) = tmp_path.glob("new/lib/python*/site-packages")
    link_requirements(wheel, frozenset({"torch"}), packages)
    text = (ROOT / "docs" / "tutorial" / "first-test.md").read_text(encoding="utf-8")
    (wanted,) = re.findall(r"^\$ pip install (.*)$", text, re.MULTILINE)
    assert f"\n$ pip install {wanted}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "pytest-accel").symlink_to(ROOT)
    suite = tmp_path / "suite"
    suite.mkdir()
    installed = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check"),
            *("--python", str(tmp_path / "new"), "install", "--no-index", "--find-links", str(wheel.parent)),
            "--no-build-isolation",
            *shlex.split(wanted),
        ],
        cwd=suite,
        capture_output=True,
        text=True,
        check=False,
    )
    assert installed.returncode == 0, installed.stderr
    assert f"Successfully installed pytest-accel-{pytest_accel.__version__}\n" in installed.stdout

    files = re.findall(r"Write\s`(\w+\.py)`:\n\n```python(?: fails)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
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
