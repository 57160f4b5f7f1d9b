"""pytest-insta in ranks: each rank compares with the stored files; the driver writes, records and deletes them once."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import require, take
from pytest_accel.features.plugins.rank_files import RankFiles, WrittenFiles

_MODULE = "pytest_insta.session"
_CHANGES = ("created", "updated", "recorded", "deleted")
"""Attributes of pytest-insta's `SnapshotSession`: the files that its summary lists."""


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps pytest-insta from writing in a rank."""
    return _InRank(config, take(_MODULE, "SnapshotContext"))


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that writes snapshots. Raise an error for an unknown release."""
    require(import_module(_MODULE), "SnapshotContext", "remove_path")
    require(config, "_snapshot_session")
    session: Any = vars(config)["_snapshot_session"]
    require(session, *_CHANGES)
    return _InDriver(config, session)


class _InRank(RankFiles):
    """Collects the snapshots that a test of a rank would change."""

    def __init__(self, config: pytest.Config, context: Any) -> None:
        super().__init__(config)
        self._listed: dict[str, list[str]] = {name: [] for name in _CHANGES}
        """The files that this phase would change, by the attribute of pytest-insta's session that lists them."""
        module: Any = import_module(_MODULE)
        module.remove_path = self.delete
        context.flush = self._collecting(context.flush)

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

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
        listed, self._listed = self._listed, {name: [] for name in _CHANGES}
        return {**super().send(item, report), "listed": listed}


class _InDriver(WrittenFiles):
    """Makes the changes on which the ranks of a test agree, and has pytest-insta list them."""

    def __init__(self, config: pytest.Config, session: Any) -> None:
        super().__init__("insta", config)
        self._session = session

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> list[str]:
        deleted = [{name for name, data in one["files"].items() if data is None} for one in sent.values()]
        everywhere = set.intersection(*deleted)
        for one in sent.values():  # A rank deletes what it does not use; another may use it.
            one["files"] = {name: data for name, data in one["files"].items() if data is not None or name in everywhere}
        done = super().merge(item, report, sent)
        for one in sent.values():
            changed = {name for name in one["files"] if name in done}
            for change in _CHANGES:
                listed = getattr(self._session, change)
                listed.update(Path(name) for name in one["listed"][change] if os.path.abspath(name) in changed)
        return done
