"""Bridges to other plugins: they bring the data that a plugin collects in ranks to the driver, which reports it.

There is one module for each supported plugin. It is imported only in sessions that have marked tests and have loaded
that plugin. A rank does not use the bridge if `accel_rank_plugins` gives the plugin another role than the bridge
expects. A module has one or both of

- ``rank_plugin(config)``, called in a rank when all plugins have been configured, and
- ``driver_plugin(config)``, called in the driver when its first marked tests have been collected. It may raise
  `pytest.UsageError` to refuse a use of the plugin that does not work with ranks,

or in place of both ``plugin(config)``, called in ranks and in the driver. Each returns None, or an object to register
with pytest. Two methods of the object are called in addition to its hooks:

- ``send(item, report)`` in a rank, for each phase that it reports, returns plain data for the driver, or None.
- ``merge(item, report, sent)`` in the driver, for each phase in which a rank has sent data: `sent` has the data by
  rank, in the order of the ranks. It may change `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pytest

from pytest_accel.bridges.refusals import is_loaded, refusals
from pytest_accel.core.plugin_roles import with_default_roles
from pytest_accel.rank.context import RANK
from pytest_accel.rank.rank_data import OWN_PREFIX, OwnData

BRIDGES: Mapping[str, str] = MappingProxyType(
    {
        "_hypothesis_pytestplugin": "hypothesis_results",
        "_pytest.junitxml": "junit",
        "allure_pytest.plugin": "allure",
        "approvaltests.integrations.pytest.pytest_plugin": "approvals",
        "buildkite_test_collector.pytest_plugin": "buildkite",
        "ctrf.main": "ctrf",
        "inline_snapshot.pytest_plugin": "inline_snapshot",
        "memray_manager": "memray",
        "pytest_arraydiff.plugin": "array_files",
        "pytest_bdd.plugin": "bdd",
        "pytest_benchmark.plugin": "benchmark",
        "pytest_dependency": "dependency",
        "pytest_django.plugin": "django",
        "pytest_durations": "durations",
        "pytest_flakefinder": "flakefinder",
        "pytest_forked": "forked",
        "pytest_harvest.plugin": "harvest",
        "pytest_html.plugin": "html",
        "pytest_insta.plugin": "insta",
        "pytest_isolate.plugin": "isolate",
        "pytest_jsonreport.plugin": "json_report",
        "pytest_line_profiler": "line_profiler",
        "pytest_metadata.plugin": "metadata",
        "pytest_monitor.pytest_monitor": "monitor",
        "pytest_mpl.plugin": "mpl_images",
        "pytest_nunit.plugin": "nunit",
        "pytest_order.plugin": "pytest_order",
        "pytest_print": "print",
        "pytest_profiling": "profiling",
        "pytest_recording.plugin": "recording",
        "pytest_regressions.plugin": "regressions",
        "pytest_run_parallel.plugin": "run_parallel",
        "pytest_snapshot.plugin": "pytest_snapshot",
        "syrupy": "syrupy",
        "teamcity.pytest_plugin": "teamcity",
        "testmon.pytest_testmon": "testmon",
        "xprocess.pytest_xprocess": "xprocess",
    }
)
"""The module of a plugin's bridge, by the name of the plugin (`refusals.is_loaded`)."""


def in_rank(config: pytest.Config) -> Iterator[object]:
    """Yield the plugins of a rank: for each plugin that it has loaded or left out, if it has its default role."""
    context = config.stash[RANK]
    plugins = with_default_roles(config.pluginmanager, context.absent, dict(context.session.roles))
    for key, bridge in _made("rank_plugin", config, plugins.__contains__):
        yield bridge
        if hasattr(bridge, "send"):
            yield _Sender(key, bridge.send)


def in_driver(config: pytest.Config) -> Iterator[object]:
    """Yield the plugins of the driver. Raise `pytest.UsageError` if a bridge does not support its plugin."""
    for key, bridge in _made("driver_plugin", config, partial(is_loaded, config)):
        yield bridge
        if hasattr(bridge, "merge"):
            yield _Receiver(key, bridge.merge)


def refuse(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` if a plugin is used in a way that cannot work with marked tests."""
    if refused := list(refusals(config)):
        raise pytest.UsageError("\n".join(refused))


def _made(function: str, config: pytest.Config, has: Callable[[str], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the key and the object of each bridge whose `function` returns one."""
    for name, bridge in BRIDGES.items():
        if has(name):
            module: Any = import_module(f"pytest_accel.bridges.{bridge}")
            make = getattr(module, function, None) or getattr(module, "plugin", None)
            made = None if make is None else make(config)
            if made is not None:
                yield f"{OWN_PREFIX}{bridge}", made


class _Sender:
    """Sends the data of a bridge from a rank, under a key that no conftest or other plugin can use."""

    def __init__(self, key: str, send: Callable[[pytest.Item, pytest.TestReport], object]) -> None:
        self._key = key
        self._send = send

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> OwnData | None:
        data = self._send(item, report)
        return None if data is None else OwnData({self._key: data})


class _Receiver:
    """Gives a bridge in the driver the data of the bridge in the ranks."""

    def __init__(self, key: str, merge: Callable[[pytest.Item, pytest.TestReport, dict[int, Any]], None]) -> None:
        self._key = key
        self._merge = merge

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        sent = {rank: data[self._key] for rank, data in sorted(rank_data.items()) if self._key in data}
        if sent:
            self._merge(item, report, sent)
