"""Tests of the selection of modules to preload; ``tests/features/test_preload.py`` tests the preloading itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_accel.core.preload_discovery import imports_of, marks_in, worth_preloading


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide a project with its own package, and a virtual environment in it with installed packages."""
    installed = tmp_path / "project" / ".venv" / "lib" / "site-packages"
    for package in (
        installed / "installed_package",
        tmp_path / "elsewhere" / "installed_in_place",
        tmp_path / "project" / "own_package",
    ):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(package.parent)
    (installed / "namespace_only").mkdir()
    return tmp_path / "project"


def selected(root: Path, *names: str) -> tuple[str, ...]:
    """Return those of `names` that are worth preloading for the project `root`."""
    return worth_preloading(names, root)


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("import pytest\n@pytest.mark.distributed(2)\ndef test(): ...\n", {"distributed"}),
        ("pytestmark = [pytest.mark.devices, pytest.mark.slow]\n", {"devices"}),
        (
            "from pytest import mark\n@mark . devices(2)\n@mark.distributed\nclass Test: ...\n",
            {"devices", "distributed"},
        ),
        ("def distributed(): devices = bookmark.devices\n", set()),
        ("@pytest.mark.devices_of_old\n", set()),
        ("", set()),
    ],
)
def test_marks_are_found_in_the_text(tmp_path: Path, text: str, marks: set[str]) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    assert marks_in(path) == marks


def test_imports_are_found_in_the_text(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        "import numpy as np\nfrom torch.nn import Linear\nfrom . import sibling\nimport a.b as c\n"
        "def test():\n\timport deferred\n    # import commented\n    important = 'import'\n"
    )
    assert imports_of(path) == {"numpy", "torch", "a", "deferred"}


def test_a_missing_file_has_no_marks_or_imports_and_undecodable_bytes_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    assert (marks_in(path), imports_of(path)) == (set(), set())
    path.write_bytes(b"\xff\xfe import x\nimport numpy\n@pytest.mark.devices\n")
    assert (marks_in(path), imports_of(path)) == ({"devices"}, {"numpy"})


def test_installed_packages_are_selected(site: Path) -> None:
    names = ("installed_package", "installed_in_place", "installed_package")
    assert selected(site, *names) == ("installed_in_place", "installed_package")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("own_package", id="the project's own"),
        pytest.param("json", id="standard library"),
        pytest.param("zlib", id="built in"),
        pytest.param("no_such_package", id="not installed"),
        pytest.param("namespace_only", id="namespace package"),
        pytest.param("_pytest", id="private"),
        pytest.param("xdist", id="a pytest plugin"),
        pytest.param("pytest_accel", id="a pytest plugin's other modules"),
        pytest.param("__main__", id="main module"),
    ],
)
def test_other_modules_are_not_selected(site: Path, name: str) -> None:
    assert selected(site, name, "installed_package") == ("installed_package",)


def test_the_selection_does_not_import_a_package(site: Path) -> None:
    package = site / ".venv" / "lib" / "site-packages" / "installed_package" / "__init__.py"
    package.write_text("raise AssertionError('imported')\n")
    assert selected(site, "installed_package") == ("installed_package",)
