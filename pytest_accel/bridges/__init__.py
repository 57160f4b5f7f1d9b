"""Bridges to other plugins: they bring the data that a plugin collects in ranks to the driver, which reports it.

There is one module for each supported plugin. It is imported only in sessions that have marked tests and have loaded
that plugin. A rank does not use the bridge if `accel_rank_plugins` gives the plugin another role than the bridge
expects. A module has one or both of

- ``rank_plugin(config)``, called in a rank when all plugins have been configured, and
- ``driver_plugin(config)``, called in the driver when its first marked tests have been collected. It may raise
  `pytest.UsageError` to refuse a use of the plugin that does not work with ranks.

Each returns an object to register with pytest, or None. `pytest_accel.hooks` has the hooks by which they exchange data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pytest

from pytest_accel.bridges.own_keys import with_own_keys
from pytest_accel.bridges.refusals import is_loaded, refusals
from pytest_accel.core.plugin_roles import with_default_roles
from pytest_accel.rank.context import RANK

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
    """Yield the bridges of a rank: one for each plugin that it has loaded or left out, if it has its default role."""
    context = config.stash[RANK]
    plugins = with_default_roles(config.pluginmanager, context.absent, dict(context.session.roles))
    return _made("rank_plugin", config, plugins.__contains__)


def in_driver(config: pytest.Config) -> Iterator[object]:
    """Yield the bridges of the driver. Raise `pytest.UsageError` if one does not support its plugin."""
    return _made("driver_plugin", config, partial(is_loaded, config))


def refuse(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` if a plugin is used in a way that cannot work with marked tests."""
    if refused := list(refusals(config)):
        raise pytest.UsageError("\n".join(refused))


def _made(function: str, config: pytest.Config, has: Callable[[str], bool]) -> Iterator[object]:
    for name, module in BRIDGES.items():
        if has(name):
            make: Any = getattr(import_module(f"pytest_accel.bridges.{module}"), function, None)
            made = None if make is None else make(config)
            if made is not None:
                yield with_own_keys(made)
