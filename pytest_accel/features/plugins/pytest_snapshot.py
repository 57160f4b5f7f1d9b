"""pytest-snapshot: each rank compares with the stored files; the driver writes new files once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import require, take
from pytest_accel.features.plugins.rank_files import RankFiles, WrittenFiles

_NAME = "pytest-snapshot"


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps pytest-snapshot from writing in a rank."""
    snapshot = _class()
    original: Callable[[Any, Any], Path] = snapshot._snapshot_path
    files = RankFiles(config)
    path_class = _path_class(files)

    def _snapshot_path(self: Any, snapshot_name: Any) -> Any:
        __tracebackhide__ = True
        return path_class(original(self, snapshot_name))

    snapshot._snapshot_path = _snapshot_path
    return files


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that writes snapshots. Raise an error for an unknown release."""
    _class()
    return WrittenFiles(_NAME, config)


def _class() -> Any:
    snapshot = take("pytest_snapshot.plugin", "Snapshot")
    require(snapshot, "_snapshot_path")
    return snapshot


def _path_class(files: RankFiles) -> Any:
    """Return a path class that records changes in `files`, and reads as if the changes had been made."""
    base: Any = type(Path())

    def is_file(path: Any) -> bool:
        return files.changed(path) is not None if files.is_changed(path) else base.is_file(path)

    def exists(path: Any, **options: Any) -> bool:
        return files.changed(path) is not None if files.is_changed(path) else base.exists(path, **options)

    def read_bytes(path: Any) -> bytes | None:
        if files.is_changed(path):
            return files.changed(path)
        files.keep(path)  # If the content differs, the caller writes the file next, which overrides this.
        data: bytes = base.read_bytes(path)
        return data

    def mkdir(path: Any, *args: Any, **options: Any) -> None:
        """Do nothing: the driver creates the folders of the files that it writes."""

    members = {
        "exists": exists,
        "is_file": is_file,
        "mkdir": mkdir,
        "read_bytes": read_bytes,
        "unlink": lambda path: files.delete(path),
        "write_bytes": lambda path, data: files.write(path, data),
    }
    return type("SnapshotPath", (base,), members)
