"""buildkite-test-collector: spans that tests measure in ranks with the fixture `spans`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any
from uuid import uuid4

import pytest

from pytest_accel.bridges.by_rank import groups, plain
from pytest_accel.bridges.internals import require
from pytest_accel.stash import RANK

KEY = "buildkite"
_PLUGIN = "_buildkite"
"""The attribute of a config in which the plugin keeps the object that collects a session's tests."""
_PAYLOAD = "buildkite_test_collector.collector.payload"


def rank_plugin(config: pytest.Config) -> object | None:
    rank = _Rank(config.stash[RANK].session.clock)
    setattr(config, _PLUGIN, rank)  # The fixture adds spans to what is under the test's id in `in_flight`.
    return rank


def driver_plugin(config: pytest.Config) -> object | None:
    collector = getattr(config, _PLUGIN, None)
    if collector is None:
        return None
    require("buildkite-test-collector", import_module(_PAYLOAD), "TestData", "TestSpan")
    require("buildkite-test-collector", collector, "in_flight", "payload")
    return _Driver(collector)


class _Rank:
    def __init__(self, clock: float) -> None:
        self.in_flight: dict[str, Any] = {}
        self._clock = clock

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        scope, _, name = item.nodeid.rpartition("::")
        self.in_flight = {item.nodeid: import_module(_PAYLOAD).TestData.start(uuid4(), scope=scope, name=name)}

    def pytest_accel_rank_data(self, item: pytest.Item) -> dict[str, Any] | None:
        test = self.in_flight[item.nodeid]
        spans, history = test.history.children, replace(test.history, children=())
        if not spans:
            return None
        self.in_flight[item.nodeid] = replace(test, history=history)
        return {KEY: [self._plain(span) for span in spans]}

    def _plain(self, span: Any) -> dict[str, Any]:
        times = {
            name: None if instant is None else instant.seconds + self._clock
            for name, instant in (("start_at", span.start_at), ("end_at", span.end_at))
        }
        return {
            "section": span.section,
            "duration": span.duration.total_seconds(),
            "detail": plain(span.detail),
            **times,
        }


class _Driver:
    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def pytest_accel_merge(self, item: pytest.Item, rank_data: dict[int, dict[str, Any]]) -> None:
        said = {rank: data[KEY] for rank, data in rank_data.items() if KEY in data}
        spans = [_span(max(group.values(), key=_duration)) for group in groups(said, _content)]
        collector = self._collector
        if item.nodeid in collector.in_flight:
            for span in spans:
                collector.in_flight[item.nodeid] = collector.in_flight[item.nodeid].push_span(span)
        elif spans:  # The plugin has concluded the test: it does so before it hears of the report of the teardown.
            *others, last = collector.payload.data
            for span in spans:
                last = last.push_span(span)
            collector.payload = replace(collector.payload, data=(*others, last))


def _span(sent: dict[str, Any]) -> Any:
    instant = import_module("buildkite_test_collector.collector.instant").Instant
    times = {name: None if sent[name] is None else instant(sent[name]) for name in ("start_at", "end_at")}
    return import_module(_PAYLOAD).TestSpan(
        section=sent["section"], duration=timedelta(seconds=sent["duration"]), detail=sent["detail"], **times
    )


def _duration(sent: dict[str, Any]) -> float:
    return float(sent["duration"])


def _content(sent: dict[str, Any]) -> str:
    """Return what of a span does not depend on time."""
    return repr((sent["section"], sent["detail"]))
