"""Tests of kinds of accelerators that other packages publish as entry points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documentation import ROOT, blocks
from tests.features.conftest import Suite
from tests.installed_packages import InstalledPackages

PAGE = ROOT / "docs" / "how-to" / "add-a-vendor.md"
(ACME,) = blocks(PAGE, "python")
(ENTRY_POINTS,) = blocks(PAGE, "toml")
(TESTS,) = blocks(PAGE, "py")
ONE_TEST = """
import pytest


@pytest.mark.devices
def test_it(accel):
    assert accel.ids == ("{}",)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: Suite) -> InstalledPackages:
    """Provide an empty folder of installed packages from which sessions import: it is on ``PYTHONPATH``."""
    return InstalledPackages(tmp_path / "packages", monkeypatch)


@pytest.fixture
def acme(packages: InstalledPackages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstalledPackages:
    """Install the documentation's package on a machine with three of its devices; provide the folder of packages."""
    head, entry_point = ENTRY_POINTS.splitlines()
    assert head == '[project.entry-points."pytest_accel.vendors"]'
    packages.install_vendor("acme-accel", entry_point.replace('"', ""), "acme_accel", ACME)
    (tmp_path / "dev").mkdir()
    for number in range(3):
        (tmp_path / "dev" / f"acme{number}").touch()
    monkeypatch.setenv("ACME_ROOT", str(tmp_path))
    return packages


def test_the_kind_in_the_documentation_works(suite: Suite, acme: InstalledPackages) -> None:
    suite.write("test_it.py", TESTS)
    more = "import pytest\n\n@pytest.mark.devices(4, kind='acme')\ndef test_four(): ...\n\n"
    suite.write("test_more.py", f"{more}@pytest.mark.devices(kind='acne')\ndef test_kind(): ...\n")
    run = suite.run("-rs", "--accel=acme", "--accel-require=acme:3", "-n1")
    assert run.count() == {"PASSED": 2, "SKIPPED": 1, "ERROR": 1}, run.text
    assert "needs 4 acme devices; there are 3: 3 x Acme One" in run.text
    assert "accel: acme, 3 devices: 3 x Acme One" in run.text
    assert re.search("kind must be one of cuda, rocm, .* sim, acme or None, got 'acne'", run.failure("test_kind"))


@pytest.mark.long
def test_auto_finds_a_published_kind_and_its_mask(
    suite: Suite, acme: InstalledPackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", "2,0")
    suite.write("test_it.py", ONE_TEST.format("acme-2"))
    run = suite.run("--accel=auto", "--accel-order=2")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    allowed = "0 (acme-2), 1 (acme-0)"
    assert f"--accel-order: '2' names no device; allowed are {allowed}" in run.errors
    run = suite.run("--accel=auto")
    assert run.count() == {"PASSED": 1}, run.text
    assert "accel: acme, 2 devices: 2 x Acme One" in run.text
    assert "ACME_VISIBLE_DEVICES=2,0 leaves 2 of 3" in run.text


_UNUSABLE = {
    "failing": ("make", "raise ImportError('no libacme')", " cannot be loaded: ImportError: no libacme"),
    "missing": ("made", "", " cannot be loaded: AttributeError: .*made.*"),
    "partial": (
        "make",
        "class Acme:\n    kind = 'partial'\ndef make(argument):\n    return Acme()",
        " is no vendor: Acme has no backend, discover, fastest, hardware, lacking, mask, mask_variables, notes, "
        "ranks, torch_devices, verify, visible",
    ),
    "other": ("make", ACME, ": the vendor calls itself 'acme', its entry point 'other'"),
}
"""For each kind that cannot be used: the function that its entry point names, its module, and the message."""


@pytest.mark.long
def test_published_kinds_that_cannot_be_used_are_reported(suite: Suite, packages: InstalledPackages) -> None:
    suite.without_torch()
    messages = {}
    for kind, (function, code, text) in _UNUSABLE.items():
        packages.install_vendor(f"{kind}-accel", f"{kind} = {kind}_accel:{function}", f"{kind}_accel", code)
        messages[kind] = rf"kind '{kind}' of {kind}-accel 1\.0{text}"
    marked = [f"@pytest.mark.devices(kind='{kind}')\ndef test_{kind}(): ...\n" for kind in messages]
    suite.write("test_it.py", "\n".join(["import pytest\n", *marked]))
    run = suite.run("--accel=failing")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert re.search(messages["failing"], run.errors)
    assert "Traceback" not in run.text + run.errors
    run = suite.run("--accel=none")
    for kind, message in messages.items():
        assert re.match(message, run.failure(f"test_{kind}"))
    # A session that does not need these kinds still runs.
    suite.write("test_it.py", "import pytest\n\n@pytest.mark.distributed(1, init=False)\ndef test_it(): ...")
    run = suite.run("--accel=auto")
    assert run.count() == {"PASSED": 1}
    for message in messages.values():
        assert re.search(f"^accel: .*{message}", run.text, re.MULTILINE)
