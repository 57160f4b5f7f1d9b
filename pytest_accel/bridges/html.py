"""pytest-html: extras that tests add in ranks with the fixture `extras`."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.bridges.by_rank import merge_equal, number_of_ranks, to_plain
from pytest_accel.bridges.internals import take

KEY = "html"


def rank_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that sends the extras of a rank; None if no page is written."""
    return _Rank(_stash_key()) if config.option.htmlpath else None


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the extras to the reports of marked tests; None if no page is written."""
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
        # Like pytest-html, send the extras that exist after the call phase.
        extras = item.config.stash.get(self._key, None) if report.when == "call" else None
        return {KEY: to_plain(extras)} if extras else None


class _Driver:
    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        received = {rank: data[KEY] for rank, data in rank_data.items() if KEY in data}
        if received:
            merged = [
                {**extra, "name": f"{extra['name']}{label}"}
                for label, extra in merge_equal(received, number_of_ranks(item))
            ]
            report.extras = [*getattr(report, "extras", ()), *merged]  # type: ignore[attr-defined]
