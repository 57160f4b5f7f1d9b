"""pytest-html: extras that tests add in ranks with the fixture `extras`."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.features.plugins.by_rank import merge_equal, number_of_ranks, to_plain
from pytest_accel.features.plugins.unknown_releases import WithoutBridge, take

WITHOUT = WithoutBridge("pytest-html", "the extras of ranks")


def plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the ranks' extras to the reports of marked tests; None if no page is written."""
    return _Extras() if config.option.htmlpath else None


class _Extras:
    def __init__(self) -> None:
        self._key: pytest.StashKey[list[dict[str, Any]]]
        self._key = take("pytest_html.fixtures", "extras_stash_key")

    def send(self, item: pytest.Item, report: pytest.TestReport) -> object:
        # Like pytest-html, send the extras that exist after the call phase.
        extras = item.config.stash.get(self._key, None) if report.when == "call" else None
        return to_plain(extras) if extras else None

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, list[dict[str, Any]]]) -> None:
        merged = merge_equal(sent, number_of_ranks(item))
        named = [{**extra, "name": f"{extra['name']}{label}"} for label, extra in merged]
        report.extras = [*getattr(report, "extras", ()), *named]  # type: ignore[attr-defined]
