"""pytest-insta in ranks: each rank compares with the stored files; the driver writes, records and deletes them once."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_accel.bridges.rank_files import RankFiles, WrittenFiles

_KEY = "insta"
_CHANGES = ("created", "updated", "recorded", "deleted")
"""Attributes of pytest-insta's `SnapshotSession`: the files that its summary lists."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that keeps pytest-insta from writing in a rank."""
    return _InRank(config) if _fits() else None


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that writes snapshots. Raise `pytest.UsageError` for an unsupported release."""
    if not _fits():
        raise pytest.UsageError(
            "this release of pytest-insta cannot be used with tests that run in ranks: its SnapshotSession has "
            "changed; install another release, or disable the plugin: -p no:insta"
        )
    return _InDriver(config)


def _module() -> Any:
    return import_module("pytest_insta.session")


def _fits() -> bool:
    module = _module()
    fields = getattr(getattr(module, "SnapshotSession", None), "__dataclass_fields__", {})
    return {*_CHANGES} <= fields.keys() and hasattr(module, "remove_path") and hasattr(module, "SnapshotContext")


class _InRank(RankFiles):
    """Collects the snapshots that a test of a rank would change."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(_KEY, config)
        self._listed: dict[str, list[str]] = {name: [] for name in _CHANGES}
        """The files that this phase would change, by the attribute of pytest-insta's session that lists them."""
        _module().remove_path = self._remove
        context = _module().SnapshotContext
        context.flush = self._collecting(context.flush)

    def _remove(self, path: Path) -> None:
        self.delete(path)

    def _collecting(self, flush: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Return `SnapshotContext.flush` for a rank: it collects what the original would write."""

        def collect(context: Any, session: Any) -> None:
            for path in context.matching:
                self.keep(path)
            context.differing = {
                path: (SimpleNamespace(dump=self._dumping(form)), value)
                for path, (form, value) in context.differing.items()
            }
            flush(context, session)
            for name, listed in self._listed.items():
                paths = getattr(session, name)
                listed += [str(path) for path in sorted(paths)]
                paths.clear()

        return collect

    def _dumping(self, form: Any) -> Callable[[Path, Any], None]:
        """Return the method `dump` of the format `form` for a rank."""

        def dump(path: Path, value: Any) -> None:
            with self.staged(path.parent) as stage:
                form.dump(stage / path.name, value)

        return dump

    def pytest_accel_rank_data(self) -> dict[str, Any]:
        data = super().pytest_accel_rank_data()
        data[_KEY]["listed"], self._listed = self._listed, {name: [] for name in _CHANGES}
        return data


class _InDriver(WrittenFiles):
    """Makes the changes on which the ranks of a test agree, and has pytest-insta list them."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(_KEY, config)
        self._session: Any = vars(config)["_snapshot_session"]

    def _merge(self, report: pytest.TestReport, sent: dict[int, dict[str, Any]], *, complete: bool) -> list[str]:
        deleted = [{name for name, data in one["files"].items() if data is None} for one in sent.values()]
        everywhere = set.intersection(*deleted)
        for one in sent.values():  # A rank deletes what it does not use; another may use it.
            one["files"] = {name: data for name, data in one["files"].items() if data is not None or name in everywhere}
        done = super()._merge(report, sent, complete=complete)
        for one in sent.values():
            changed = {name for name in one["files"] if name in done}
            for change in _CHANGES:
                listed = getattr(self._session, change)
                listed.update(Path(name) for name in one["listed"][change] if os.path.abspath(name) in changed)
        return done
