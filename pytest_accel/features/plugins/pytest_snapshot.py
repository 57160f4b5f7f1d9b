"""pytest-snapshot: each rank compares with the stored files; the driver writes new files once, if all ranks agree."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.features.plugins.by_rank import difference, fail, number_of_ranks, shown_path
from pytest_accel.features.plugins.refusals import given
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, require, take

WITHOUT = WithoutBridge(
    "pytest-snapshot",
    damage="each rank would write or delete snapshots",
    applies=given("--snapshot-update", "--allow-snapshot-deletion"),
)


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps pytest-snapshot from writing in a rank."""
    snapshot = _class()
    original: Callable[[Any, Any], Path] = snapshot._snapshot_path
    changes = _Changes()
    path_class = _path_class(changes)

    def _snapshot_path(self: Any, snapshot_name: Any) -> Any:
        __tracebackhide__ = True
        return path_class(original(self, snapshot_name))

    snapshot._snapshot_path = _snapshot_path
    return changes


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that writes snapshots. Raise an error for an unknown release."""
    _class()
    return _Writer(config)


def _class() -> Any:
    snapshot = take("pytest_snapshot.plugin", "Snapshot")
    require(snapshot, "_snapshot_path")
    return snapshot


class _Changes:
    """Collects the changes that the running test would make to snapshots. A pytest plugin in the rank."""

    def __init__(self) -> None:
        self._written: dict[str, bytes | None] = {}
        """The changes of the running test by absolute path; None: the file is deleted."""
        self._unsent: dict[str, bytes | None] = {}
        """The changes of this phase, in the same form."""
        self._kept: set[str] = set()
        """Absolute paths of files whose content was correct in this phase: no other rank may change them."""

    def write(self, path: Path, data: bytes | None) -> None:
        """Have the driver write `data` to the file `path`; None: delete the file."""
        name = os.path.abspath(path)
        self._written[name] = self._unsent[name] = data

    def is_changed(self, path: Path) -> bool:
        """Return whether the running test has changed the file `path`."""
        return os.path.abspath(path) in self._written

    def changed(self, path: Path) -> bytes | None:
        """Return what the running test has written to the file `path`; None: it has deleted it."""
        return self._written[os.path.abspath(path)]

    def keep(self, path: Path) -> None:
        """Record that the file `path` is correct for this rank."""
        self._kept.add(os.path.abspath(path))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._written.clear()  # In a rerun the files are in the state in which the driver has left them.
        self._unsent.clear()
        self._kept.clear()

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
        """Return the changes of this phase, even if there are none: the driver waits for data of all ranks."""
        sent = {"files": dict(self._unsent), "kept": sorted(self._kept - self._unsent.keys())}
        self._unsent.clear()
        self._kept.clear()
        return sent


def _path_class(changes: _Changes) -> Any:
    """Return a path class that records changes in `changes`, and reads as if they had been made."""
    base: Any = type(Path())

    def is_file(path: Any) -> bool:
        return changes.changed(path) is not None if changes.is_changed(path) else base.is_file(path)

    def exists(path: Any, **options: Any) -> bool:
        return changes.changed(path) is not None if changes.is_changed(path) else base.exists(path, **options)

    def read_bytes(path: Any) -> bytes | None:
        if changes.is_changed(path):
            return changes.changed(path)
        changes.keep(path)  # If the content differs, the caller writes the file next, which overrides this.
        data: bytes = base.read_bytes(path)
        return data

    def mkdir(path: Any, *args: Any, **options: Any) -> None:
        """Do nothing: the driver creates the folders of the files that it writes."""

    members = {
        "exists": exists,
        "is_file": is_file,
        "mkdir": mkdir,
        "read_bytes": read_bytes,
        "unlink": lambda path: changes.write(path, None),
        "write_bytes": lambda path, data: changes.write(path, data),
    }
    return type("SnapshotPath", (base,), members)


class _Writer:
    """Makes the changes on which all ranks of a test agree. A pytest plugin in the driver."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        complete = len(sent) == number_of_ranks(item)
        for name in sorted({name for one in sent.values() for name in one["files"]}):
            values = {rank: one["files"][name] for rank, one in sent.items() if name in one["files"]}
            values |= {rank: _content(Path(name)) for rank, one in sent.items() if name in one["kept"]}
            shown = shown_path(self._config, name)
            text = difference(values)
            if text is not None:
                _fail(report, f"{shown} differs between ranks; it is left as it was\n{text}")
            elif not complete:
                _fail(report, f"{shown} is left as it was: only {ranks_text(list(sent))} reported")
            else:
                _put(Path(name), next(iter(values.values())))


def _fail(report: pytest.TestReport, text: str) -> None:
    fail(report, "pytest-snapshot", text)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _put(path: Path, data: bytes | None) -> None:
    """Write `data` to the file `path`, and create its folders; delete the file if `data` is None."""
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
