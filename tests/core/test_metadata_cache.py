"""Tests of the cached metadata of installed distributions."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pytest_accel.core.metadata_cache import Installed


def _told() -> list[tuple[str, str, list[str], list[str]]]:
    """All that pytest and its plugins ask for."""
    return [
        (one.metadata["Name"], one.version, sorted(map(str, one.entry_points)), sorted(map(str, one.files or ())))
        for one in metadata.distributions()
    ]


def test_what_is_remembered_is_what_is_there() -> None:
    truth, installed = _told(), Installed()
    for _ in range(2):
        with installed.remembered():
            assert _told() == truth
            assert metadata.version("pytest") == pytest.__version__
            assert metadata.entry_points(group="pytest11")
            with pytest.raises(metadata.PackageNotFoundError):
                metadata.version("no-such-package")
    assert _told() == truth


def test_each_thing_is_read_once_and_another_folder_when_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(name: str) -> Path:
        folder = tmp_path / name / f"{name}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[of_{name}]\nentry = {name}:entry\n")
        monkeypatch.syspath_prepend(str(tmp_path / name))
        return folder

    installed, first = Installed(), install("first")
    with installed.remembered():
        assert [entry.name for entry in metadata.entry_points(group="of_first")] == ["entry"]
    (first / "entry_points.txt").unlink()
    install("second")
    with installed.remembered():
        assert [entry.name for entry in metadata.entry_points(group="of_first")] == ["entry"]
        assert [entry.name for entry in metadata.entry_points(group="of_second")] == ["entry"]
    assert not metadata.entry_points(group="of_first")


def test_a_relative_folder_is_another_one_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here" / "late-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1.0\n")
    os.utime(folder.parent, (1, 1))  # importlib's own memory of a folder goes by its name and this time.
    monkeypatch.setattr(sys, "path", [*sys.path, "."])
    installed = Installed()
    for where, there in ((tmp_path, False), (folder.parent, True)):
        monkeypatch.chdir(where)
        with installed.remembered():
            assert ("late" in {one.metadata["Name"] for one in metadata.distributions()}) == there
