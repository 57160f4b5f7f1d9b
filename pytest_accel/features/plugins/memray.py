"""pytest-memray: its report shows each marked test as recorded by the rank with the highest memory peak.

Each rank checks a test's limits against its own memory. It writes recordings into the session's private folder, and
sends them to the driver, which stores that of one rank where pytest-memray expects it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.features.plugins.unknown_releases import WithoutBridge, require, take
from pytest_accel.rank.context import RANK

WITHOUT = WithoutBridge("pytest-memray", "the recordings")

_MODULE = "pytest_memray.plugin"
_PLUGIN = "memray_manager"
_MANAGER = ("config", "results", "result_path", "result_metadata_path", "_tmp_dir", "_bin_prefix")


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that sends a rank's recordings."""
    manager = _manager(config)
    context = config.stash[RANK]
    if manager._tmp_dir is not None:  # pytest-memray creates it if MEMRAY_RESULT_PATH is not set.
        manager._tmp_dir.cleanup()
    # The rank needs a recording only until the test's limits have been checked.
    folder = Path(context.session.directory, f"w{context.spec.world}r{context.rank}.memray")
    manager.result_path, manager.result_metadata_path = folder, folder / "metadata"
    manager.result_metadata_path.mkdir(parents=True)
    manager.config = _WithoutCache(config)
    return _InRank(manager)


def driver_plugin(config: pytest.Config) -> object:
    """Return the plugin that keeps the ranks' recordings."""
    return _InDriver(_manager(config))


def _manager(config: pytest.Config) -> Any:
    manager = config.pluginmanager.get_plugin(_PLUGIN)
    require(manager, *_MANAGER)
    return manager


class _WithoutCache:
    """The config without its cache, because only the driver compares a peak with that of the last run."""

    cache = None

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _truncated(name: str) -> str:
    """Return `name` truncated as by pytest-memray, because it may be too long for a file name."""
    truncate = getattr(import_module(_MODULE), "_truncate_filename", str)  # Old releases have none.
    return str(truncate(name))


class _InRank:
    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        result = self._manager.results.pop(item.nodeid, None)
        if result is None:
            return None
        recording = result.result_file.read_bytes()
        result.result_file.unlink()
        for file in self._manager.result_metadata_path.iterdir():
            file.unlink()
        return {"peak": result.peak_memory, "recording": recording}

    def pytest_sessionfinish(self) -> None:
        shutil.rmtree(self._manager.result_path, ignore_errors=True)


class _InDriver:
    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        """Store the recording with the highest peak, and the metadata that pytest-memray writes for a test."""
        manager, highest = self._manager, max(sent.values(), key=lambda one: one["peak"])
        if manager._tmp_dir is None and not os.getenv("MEMRAY_RESULT_PATH"):
            of_test = item.nodeid.replace("::", "-").replace(os.sep, "-")
            name = _truncated(f"{manager._bin_prefix}-{of_test}.bin")
        else:
            name = f"{uuid.uuid4().hex}.bin"
        path = manager.result_path / name
        path.write_bytes(highest["recording"])
        about = {"test_id": item.nodeid, "peak_memory": highest["peak"], "result_file": str(path)}
        metadata = manager.result_metadata_path / path.with_suffix(".metadata").name
        metadata.write_text(json.dumps(about), encoding="utf-8")
        manager.results[item.nodeid] = take(_MODULE, "Result")(item.nodeid, highest["peak"], path)
