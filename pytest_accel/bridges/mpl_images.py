"""pytest-mpl: its baseline images, hashes and results, which are those of rank 0.

The other ranks compare too, and keep the images of a failure in folders of their own below the one for results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_accel.bridges.internals import require
from pytest_accel.bridges.own_keys import with_own_keys
from pytest_accel.bridges.reference_files import Sender, Writer, fail_for_difference
from pytest_accel.stash import RANK

_KEY = "pytest_mpl"
_ATTRIBUTES = (
    "generate_dir",
    "generate_hash_library",
    "generate_summary",
    "results_always",
    "_generated_hash_library",
    "_test_results",
)


class _InRank:
    """Sends what the plugin has noted of a test."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    @pytest.hookimpl
    def pytest_accel_rank_data(self, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "call":
            return None
        noted = dict(self._plugin._test_results), dict(self._plugin._generated_hash_library)
        self._plugin._test_results.clear()
        self._plugin._generated_hash_library.clear()
        return {f"{_KEY}.noted": noted} if any(noted) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave the files of the session to the driver."""
        self._plugin.generate_hash_library = self._plugin.generate_summary = None
        self._plugin.results_always = False


class _InDriver:
    """Notes what rank 0 has noted, in place of what the driver has, which has not run the test."""

    def __init__(self, plugin: Any) -> None:
        self._plugin = plugin

    @pytest.hookimpl
    def pytest_accel_merge(self, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]) -> None:
        noted = {rank: data[f"{_KEY}.noted"] for rank, data in rank_data.items() if f"{_KEY}.noted" in data}
        if 0 not in noted:
            return
        results, hashes = noted[0]
        self._plugin._test_results.update(results)
        different = [rank for rank, (_, others) in noted.items() if others != hashes]
        if different and not report.failed:
            fail_for_difference(report, different, ["hash of its image"])
        elif not different:
            self._plugin._generated_hash_library.update(hashes)


def rank_plugin(config: pytest.Config) -> object | None:
    """Keep a rank from writing where another writes."""
    plugin, rank = _comparison(config), config.stash[RANK].rank
    if plugin is None:
        return None
    if rank:
        own: Any = config
        own.pytest_mpl_results_dir = str(Path(own.pytest_mpl_results_dir) / f"rank-{rank}")
    if plugin.generate_dir is not None:
        sender = Sender(rank, _KEY)
        config.pluginmanager.register(with_own_keys(sender))
        plugin.generate_dir = sender.folder
    return _InRank(plugin)


def driver_plugin(config: pytest.Config) -> object | None:
    """Write and note what the ranks have generated and found."""
    plugin = _comparison(config)
    if plugin is None:
        return None
    require("pytest-mpl", plugin, *_ATTRIBUTES)
    results = config.getoption("--mpl-results-path") or config.getini("mpl-results-path")
    if plugin.generate_summary and not results:
        raise pytest.UsageError(
            "--mpl-generate-summary needs --mpl-results-path where tests run in ranks, which write their images there"
        )
    if plugin.generate_dir is not None:
        config.pluginmanager.register(with_own_keys(Writer(plugin.generate_dir, _KEY)))
    return _InDriver(plugin)


def _comparison(config: pytest.Config) -> Any:
    """Return the plugin's object that compares and generates; None where the session does neither."""
    plugins = config.pluginmanager.get_plugins()
    return next((one for one in plugins if type(one).__name__ == "ImageComparison"), None)
