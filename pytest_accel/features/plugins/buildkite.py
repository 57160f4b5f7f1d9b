"""buildkite-test-collector: spans that tests measure in ranks with the fixture `spans`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any
from uuid import uuid4

import pytest

from pytest_accel.features.plugins.by_rank import group_equal, to_plain
from pytest_accel.features.plugins.internals import require
from pytest_accel.rank.context import RANK

_PLUGIN = "_buildkite"
"""The attribute of the config that holds the object with which the plugin collects a session's tests."""
_PAYLOAD = "buildkite_test_collector.collector.payload"


def rank_plugin(config: pytest.Config) -> object:
    """Return the plugin that sends the spans of a rank."""
    rank = _InRank(config.stash[RANK].session.clock)
    setattr(config, _PLUGIN, rank)  # The fixture adds spans to the entry of the test in `in_flight`.
    return rank


def driver_plugin(config: pytest.Config) -> object | None:
    """Return the plugin that adds the ranks' spans to the session's; None if nothing is collected."""
    collector = getattr(config, _PLUGIN, None)
    if collector is None:
        return None
    require(import_module(_PAYLOAD), "TestData", "TestSpan")
    require(collector, "in_flight", "payload")
    return _InDriver(collector)


class _InRank:
    """Replaces buildkite-test-collector's plugin in a rank: holds the running test, to which the fixture adds spans.

    `clock` is the number of seconds by which the driver's clock is ahead of the clock of this process.
    """

    def __init__(self, clock: float) -> None:
        self.in_flight: dict[str, Any] = {}
        self._clock = clock

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Register the test before its setup: a conftest may skip it before any plugin's `pytest_runtest_setup`."""
        scope, name = _scope_and_name(item)
        self.in_flight = {item.nodeid: import_module(_PAYLOAD).TestData.start(uuid4(), scope=scope, name=name)}
        return (yield)

    def send(self, item: pytest.Item, report: pytest.TestReport) -> list[dict[str, Any]] | None:
        test = self.in_flight[item.nodeid]
        spans, history = test.history.children, replace(test.history, children=())
        if not spans:
            return None
        self.in_flight[item.nodeid] = replace(test, history=history)
        return [self._plain(span) for span in spans]

    def _plain(self, span: Any) -> dict[str, Any]:
        times = {
            name: None if instant is None else instant.seconds + self._clock
            for name, instant in (("start_at", span.start_at), ("end_at", span.end_at))
        }
        return {
            "section": span.section,
            "duration": span.duration.total_seconds(),
            "detail": to_plain(span.detail),
            **times,
        }


class _InDriver:
    """Adds the spans of ranks to the tests of `collector`, buildkite-test-collector's plugin."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector

    def merge(self, item: pytest.Item, report: pytest.TestReport, sent: dict[int, list[dict[str, Any]]]) -> None:
        groups = group_equal(sent, _content)
        spans = [_span(max(group.values(), key=lambda span: float(span["duration"]))) for group in groups]
        collector = self._collector
        if item.nodeid in collector.in_flight:
            for span in spans:
                collector.in_flight[item.nodeid] = collector.in_flight[item.nodeid].push_span(span)
            return
        # The plugin has moved the test to its payload at the report of the teardown, unless it never saw it start.
        *others, last = collector.payload.data or (None,)
        if last is not None and (last.scope, last.name) == _scope_and_name(item):
            for span in spans:
                last = last.push_span(span)
            collector.payload = replace(collector.payload, data=(*others, last))


def _scope_and_name(item: pytest.Item) -> tuple[str, str]:
    """Return scope and name of the test `item` in the plugin's data."""
    scope, _, name = item.nodeid.rpartition("::")
    return scope, name


def _span(sent: dict[str, Any]) -> Any:
    instant = import_module("buildkite_test_collector.collector.instant").Instant
    times = {name: None if sent[name] is None else instant(sent[name]) for name in ("start_at", "end_at")}
    return import_module(_PAYLOAD).TestSpan(
        section=sent["section"], duration=timedelta(seconds=sent["duration"]), detail=sent["detail"], **times
    )


def _content(sent: dict[str, Any]) -> str:
    """Return the parts of a span that do not depend on time."""
    return repr((sent["section"], sent["detail"]))
