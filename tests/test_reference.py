"""Tests of the reference: the site builds, and the pages name all marks, options, fixtures and hooks of the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_accel

DOCS = Path(__file__).resolve().parent.parent / "docs"


def rows(page: str) -> dict[str, list[str]]:
    """Return the other cells of each table row by the names in backticks in its first cell; of two rows, the first."""
    found: dict[str, list[str]] = {}
    for line in (DOCS / "reference" / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
            for name in re.findall(r"`(\w+)`", first):
                found.setdefault(name, others)
    return found


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    assert pages <= {page.relative_to(tmp_path) for page in tmp_path.rglob("*.html")}
    fixtures = (tmp_path / "reference" / "fixtures.html").read_text(encoding="utf-8")
    assert 'href="../project/security.html"' in fixtures, "a link to a file that is a page of the site"
    kubernetes = (tmp_path / "how-to" / "ci" / "kubernetes.html").read_text(encoding="utf-8")
    assert "shareProcessNamespace" in kubernetes, "a file that the page links to"
    api = (tmp_path / "reference" / "python.html").read_text(encoding="utf-8")
    assert 'id="pytest_accel.hooks.pytest_accel_merge"' in api, "an entry that is made from a docstring"


def test_each_public_name_is_documented_once() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^\.\. auto(?:class|exception|function):: pytest_accel\.(\w+)", text, re.MULTILINE)
    assert sorted([*documented, "__version__"]) == sorted(pytest_accel.__all__)


def test_the_reference_names_every_fixture_with_its_scope(pytester: pytest.Pytester) -> None:
    shown = pytester.runpytest_inprocess("--fixtures", "-p", "no:asyncio").stdout.str()
    own = re.findall(r"^(\w+)(?: \[(\w+) scope\])? -- .*\bpytest_accel/fixtures\.py:", shown, re.MULTILINE)
    scopes = {name: scope or "function" for name, scope in own}
    assert scopes["launch"] == "function"
    assert {name: cells[0] for name, cells in rows("fixtures.md").items() if name in scopes} == scopes


def test_the_reference_names_every_argument_and_attribute_of_fixtures() -> None:
    call = inspect.signature(pytest_accel.Launch.__call__)
    result = [field.name for field in dataclasses.fields(pytest_accel.LaunchResult)]
    assert {*list(call.parameters)[1:], *result} - rows("launchers.md").keys() == set()
    assert {field.name for field in dataclasses.fields(pytest_accel.Accel)} - rows("fixtures.md").keys() == set()
