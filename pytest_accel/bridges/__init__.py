"""Bridges: what other plugins learn in ranks, brought to the driver, where their session ends.

There is one module for each plugin that needs it, imported in a session that has marked tests and has loaded that
plugin. A module has one or both of

- ``rank_plugin(config)``, called in a rank when all plugins have been configured, and
- ``driver_plugin(config)``, called in the driver when its first marked tests have been collected. It may raise
  `pytest.UsageError` to refuse what would go wrong.

Each returns an object to register with pytest, or None. `pytest_accel.hooks` has the hooks by which they exchange data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pytest

from pytest_accel.bridges.refusals import refusals

BRIDGES: Mapping[str, str] = MappingProxyType(
    {
        "dependency": "dependency",
        "pytest_dependency": "dependency",
        "django": "django",
        "pytest_django.plugin": "django",
        "flakefinder": "flakefinder",
        "pytest_flakefinder": "flakefinder",
        "pytest_forked": "forked",
        "pytest_isolate": "isolate",
        "pytest_isolate.plugin": "isolate",
        "pytest-bdd": "bdd",
        "pytest_bdd.plugin": "bdd",
        "recording": "recording",
        "pytest_recording.plugin": "recording",
        "run-parallel": "run_parallel",
        "pytest_run_parallel.plugin": "run_parallel",
        "xprocess": "xprocess",
        "xprocess.pytest_xprocess": "xprocess",
        "pytest-testmon": "testmon",
        "testmon.pytest_testmon": "testmon",
        "pytest-benchmark": "benchmark",
        "harvest": "harvest",
        "pytest_harvest.plugin": "harvest",
        "line-profiler": "line_profiler",
        "pytest_line_profiler": "line_profiler",
        "memray_manager": "memray",
        "monitor": "monitor",
        "pytest_monitor.pytest_monitor": "monitor",
        "profiling": "profiling",
        "pytest_profiling": "profiling",
        "pytest-durations": "durations",
        "pytest_durations": "durations",
        "hypothesispytest": "hypothesis_results",
        "_hypothesis_pytestplugin": "hypothesis_results",
        "pytest_arraydiff": "array_files",
        "pytest_arraydiff.plugin": "array_files",
        "pytest_mpl": "mpl_images",
        "pytest_mpl.plugin": "mpl_images",
        "syrupy": "syrupy",
    }
)
"""The module of a plugin's bridge, by the name under which the plugin is registered."""


def in_rank(config: pytest.Config, absent: Iterable[str]) -> Iterator[object]:
    """Give the plugins that a rank needs for the plugins that it has loaded, or whose role there is `absent`."""
    return _made("rank_plugin", config, absent)


def in_driver(config: pytest.Config, *, refuse: bool) -> Iterator[object]:
    """Give the plugins that the driver needs.

    Raises `pytest.UsageError` for what cannot work with marked tests; without `refuse` only for what a bridge lacks.
    """
    refused = list(refusals(config)) if refuse else []
    if refused:
        raise pytest.UsageError("\n".join(refused))
    return _made("driver_plugin", config)


def _made(function: str, config: pytest.Config, absent: Iterable[str] = ()) -> Iterator[object]:
    for name, module in BRIDGES.items():
        if config.pluginmanager.has_plugin(name) or name in absent:
            make: Any = getattr(import_module(f"pytest_accel.bridges.{module}"), function, None)
            made = None if make is None else make(config)
            if made is not None:
                yield made
