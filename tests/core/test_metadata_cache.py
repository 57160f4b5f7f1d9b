"""Tests of the cached metadata of installed distributions."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pytest_accel.core.metadata_cache import remembered_metadata


def _read_metadata() -> list[tuple[str, str, list[str], list[str]]]:
    """Return the metadata of all distributions that pytest and its plugins read."""
    return [
        (one.metadata["Name"], one.version, sorted(map(str, one.entry_points)), sorted(map(str, one.files or ())))
        for one in metadata.distributions()
    ]


def test_cached_metadata_equals_the_installed_metadata() -> None:
    expected = _read_metadata()
    for _ in range(2):
        with remembered_metadata():
            assert _read_metadata() == expected
            assert metadata.version("pytest") == pytest.__version__
            assert metadata.entry_points(group="pytest11")
            with pytest.raises(metadata.PackageNotFoundError):
                metadata.version("no-such-package")
    assert _read_metadata() == expected


def test_a_folder_is_read_once_and_a_folder_added_later_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(name: str) -> Path:
        folder = tmp_path / name / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[of_{name}]\nentry = {name}:entry\n")
        monkeypatch.syspath_prepend(str(tmp_path / name))
        return folder

    first = install("first")
    with remembered_metadata():
        assert [entry.name for entry in metadata.entry_points(group="of_first")] == ["entry"]
    (first / "entry_points.txt").unlink()
    install("second")
    with remembered_metadata():
        assert [entry.name for entry in metadata.entry_points(group="of_first")] == ["entry"]
        assert [entry.name for entry in metadata.entry_points(group="of_second")] == ["entry"]
    assert not metadata.entry_points(group="of_first")


def test_a_relative_folder_is_read_again_in_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here" / "late-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    os.utime(folder.parent, (1, 1))  # importlib caches a folder by its name and this time.
    monkeypatch.setattr(sys, "path", [*sys.path, "."])
    for directory, found in ((tmp_path, False), (folder.parent, True)):
        monkeypatch.chdir(directory)
        with remembered_metadata():
            assert ("late" in {one.metadata["Name"] for one in metadata.distributions()}) == found
