"""pytest-snapshot: each rank compares with the stored files, and the driver writes and deletes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.features.plugins.rows import named
from pytest_accel.features.plugins.snapshots import Changes, agreed


def in_rank(config: pytest.Config) -> object | None:
    """Return the plugin that collects changes of files in this rank; None if files are not to be changed."""
    if not config.option.snapshot_update:
        return None
    snapshot = named("pytest_snapshot.plugin", "Snapshot")
    original = snapshot._snapshot_path
    changes = Changes()
    kind = _path_class(changes)

    def _snapshot_path(self: Any, name: Any) -> Any:
        __tracebackhide__ = True
        return kind(original(self, name))

    snapshot._snapshot_path = _snapshot_path
    return changes


def in_driver(config: pytest.Config) -> object:
    """Return the plugin that changes files; raise an error for an unknown release."""
    assert named("pytest_snapshot.plugin", "Snapshot")._snapshot_path
    return _InDriver()


def _path_class(changes: Changes) -> Any:
    """Return a path class that collects changes of files in `changes`."""
    base: Any = type(Path())

    def change(path: Any, data: bytes | None = None) -> None:
        changes.made[os.path.abspath(path)] = data

    def read_bytes(path: Any) -> bytes:
        changes.compared.add(os.path.abspath(path))
        data: bytes = base.read_bytes(path)
        return data

    members = {"mkdir": lambda path, **options: None, "read_bytes": read_bytes, "unlink": change, "write_bytes": change}
    return type("SnapshotPath", (base,), members)


class _InDriver:
    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        for name, data in agreed(item, report, sent):
            path = Path(name)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
