"""pytest-mpl: the driver writes baseline images, hashes and results of marked tests, once for all ranks.

Each rank compares its image. Ranks other than 0 keep images of failures in folders of their own, below the folder
for results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.features.plugins.internals import of_class, require
from pytest_accel.features.plugins.reference_files import GeneratedFiles, ReferenceFiles, all_agree
from pytest_accel.rank.context import RANK

_NAME = "pytest-mpl"
_PLUGIN = ("pytest_mpl.plugin", "ImageComparison")
"""The class of the object that compares and generates. It is registered only in sessions that do one of these."""
Results = Mapping[str, Mapping[str, Any]]
"""pytest-mpl's results, by the names that it gives to tests."""


def rank_plugin(config: pytest.Config) -> object | None:
    """Have a rank write images into a folder of its own; return the plugin that sends its results."""
    plugin, rank = of_class(config, *_PLUGIN), config.stash[RANK].rank
    if plugin is None:
        return None
    if rank:
        own: Any = config
        own.pytest_mpl_results_dir = str(Path(own.pytest_mpl_results_dir) / _folder(rank))
    if plugin.generate_dir is None:
        return _InRank(plugin, None)
    images = GeneratedFiles(config, _NAME)
    plugin.generate_dir = images.folder
    return _InRank(plugin, images)


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that writes the results and the generated images of ranks."""
    plugin = of_class(config, *_PLUGIN)
    if plugin is None:
        return None
    require(plugin, "generate_dir", "generate_hash_library", "generate_summary", "results_always")
    require(plugin, "_generated_hash_library", "_test_results")
    results = config.getoption("--mpl-results-path") or config.getini("mpl-results-path")
    if plugin.generate_summary and not results:
        raise pytest.UsageError(
            "--mpl-generate-summary needs --mpl-results-path where tests run in ranks, which write their images there"
        )
    return _InDriver(plugin, None if plugin.generate_dir is None else ReferenceFiles(plugin.generate_dir))


class _InRank:
    """Sends the results and hashes that pytest-mpl keeps of a test, and the images that it generates."""

    def __init__(self, plugin: Any, images: GeneratedFiles | None) -> None:
        self._plugin = plugin
        self._images = images

    def send(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        if report.when != "call":
            return None
        kept = {
            "results": dict(self._plugin._test_results),
            "hashes": dict(self._plugin._generated_hash_library),
            "images": self._images and self._images.send(item, report),
        }
        self._plugin._test_results.clear()
        self._plugin._generated_hash_library.clear()
        return kept if any(kept.values()) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave the files of the session to the driver."""
        self._plugin.generate_hash_library = self._plugin.generate_summary = None
        self._plugin.results_always = False


class _InDriver:
    """Replaces the driver's results of marked tests, which are always failures, by those of a rank."""

    def __init__(self, plugin: Any, images: ReferenceFiles | None) -> None:
        self._plugin = plugin
        self._images = images

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, dict[str, Any]]) -> None:
        """Keep the results of the first rank whose image failed, or those of rank 0 if all ranks agree."""
        failed = [rank for rank, one in sent.items() if _has_failed(one["results"])]
        agree = all_agree(item, report, {rank: _hashes(one["results"], one["hashes"]) for rank, one in sent.items()})
        if agree:
            self._plugin._generated_hash_library.update(sent[0]["hashes"])
        if agree or failed:
            rank = failed[0] if failed else 0
            results = sent[rank]["results"]
            self._plugin._test_results.update({test: _below(rank, of_test) for test, of_test in results.items()})
        generated = {rank: one["images"] for rank, one in sent.items() if one["images"] is not None}
        if self._images is not None and generated:
            self._images.merge(item, report, generated)


def _has_failed(results: Results) -> bool:
    return any(result["status"] == "failed" for result in results.values())


def _hashes(results: Results, hashes: Mapping[str, str]) -> dict[str, str]:
    """Return the hash of each image; "" if pytest-mpl makes none."""
    return {f"image of {test}": hashes.get(test, "") for test in results}


def _below(rank: int, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `result` of `rank` with the paths of its images relative to the folder of rank 0's results."""
    return {
        name: f"{_folder(rank)}/{value}" if rank and value and name.endswith("_image") else value
        for name, value in result.items()
    }


def _folder(rank: int) -> str:
    """Return the name of the folder for the results of a `rank` other than 0, below that of rank 0."""
    return f"rank-{rank}"
