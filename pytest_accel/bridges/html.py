"""pytest-html: what tests add to the fixture `extras` in ranks."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.by_rank import number_of_ranks, once, plain
from pytest_accel.bridges.internals import take

KEY = "html"


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the extras of a rank; None if no page is written."""
    return _Rank(_stash_key()) if config.option.htmlpath else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds them to the reports of marked tests; None if no page is written."""
    if not config.option.htmlpath:
        return None
    _stash_key()
    return _Driver()


def _stash_key() -> Any:
    return take("pytest-html", "pytest_html.fixtures", "extras_stash_key")


class _Rank:
    def __init__(self, key: pytest.StashKey[list[dict[str, Any]]]) -> None:
        self._key = key

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        # pytest-html, too, takes those that are there when the test's function has returned.
        extras = item.config.stash.get(self._key, None) if report.when == "call" else None
        return {KEY: plain(extras)} if extras else None


class _Driver:
    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        said = {rank: data[KEY] for rank, data in rank_data.items() if KEY in data}
        if said:
            merged = [
                {**extra, "name": f"{extra['name']}{label}"} for label, extra in once(said, number_of_ranks(item))
            ]
            report.extras = [*getattr(report, "extras", ()), *merged]  # type: ignore[attr-defined]
