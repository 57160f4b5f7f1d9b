"""Tests of files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISFIFO

import pytest

from pytest_accel.core import whole_file


def test_a_file_is_replaced_and_its_folder_created(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    for text in ("one", "caf\u00e9 \udce9"):
        whole_file.check_folder(str(path))
        whole_file.write(str(path), text)
    assert path.read_text(encoding="utf-8") == "caf\u00e9 \\udce9"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_a_pipe_is_not_replaced(tmp_path: Path, name: str) -> None:
    """The same holds for a device, which only root could replace."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    path = str(tmp_path / name)
    with pytest.raises(OSError, match="it is not a regular file"):
        whole_file.check_folder(path)
    with pytest.raises(OSError, match="it is not a regular file"):
        whole_file.write(path, "text")
    whole_file.remove(path, b"")
    assert S_ISFIFO(os.stat(path).st_mode)
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    """The file that it names is replaced and removed: as root, this would otherwise replace /dev/stdout."""
    (tmp_path / "link").symlink_to("file")
    path = str(tmp_path / "link")
    for text in ("one", "two"):
        whole_file.check_folder(path)
        whole_file.write(path, text)
        assert (tmp_path / "file").read_text() == text
    whole_file.remove(path, b"t")
    assert os.listdir(tmp_path) == ["link"]


def test_another_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for text in ("import os", "x"):
        path.write_text(text)
        with pytest.raises(FileExistsError):
            whole_file.remove(str(path), b"{<")
        assert path.read_text() == text
    path.write_text("")
    whole_file.remove(str(path), b"{<")
    assert not path.exists()
