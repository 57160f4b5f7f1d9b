"""Bridges to other plugins: they bring the data that a plugin collects in ranks to the driver, which reports it.

There is one module for each supported plugin. It is imported only in sessions that have marked tests and have loaded
that plugin. A rank does not use the bridge if `accel_rank_plugins` gives the plugin another role than the bridge
expects. A module has one or both of

- ``rank_plugin(config)``, called in a rank when all plugins have been configured, and
- ``driver_plugin(config)``, called in the driver when its first marked tests have been collected. It may raise
  `pytest.UsageError` to refuse a use of the plugin that does not work with ranks,

or in place of both ``plugin(config)``, called in ranks and in the driver. Each returns None, or an object to register
with pytest. If it raises another error, the release of the plugin is unknown. The session goes on without the bridge
where that does no damage (`unknown_releases.py`); a rank then calls ``without_bridge(config)`` of the module, if it has
this function. Two methods of the object are called in addition to its hooks:

- ``send(item, report)`` in a rank, for each phase that it reports, returns plain data for the driver, or None.
- ``merge(item, report, sent)`` in the driver, for each phase in which a rank has sent data: `sent` has the data by
  rank, in the order of the ranks. It may change `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pytest

from pytest_accel.core.plugin_roles import with_default_roles
from pytest_accel.features.plugins import unknown_releases
from pytest_accel.features.plugins.refusals import is_loaded, refusals
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
    for name, bridge in BRIDGES.items():
        if name in plugins:
            try:
                made = _make(bridge, "rank_plugin", config)
            except Exception as error:
                # The driver has found this, too: it has refused the plugin, or warned.
                if bridge not in unknown_releases.CONSEQUENCES:
                    raise
                getattr(_module(bridge), "without_bridge", _do_nothing)(config)
                yield _Refusal(name, bridge, error)
                continue
            if made is not None:
                yield made
                if hasattr(made, "send"):
                    yield _Sender(bridge, made.send)


def in_driver(config: pytest.Config, items: Sequence[pytest.Item]) -> Iterator[object]:
    """Yield the plugins of the driver, in which `items` are marked. Raise `pytest.UsageError` to refuse a plugin."""
    unknown = unknown_releases.Warnings(config)
    for name, bridge in BRIDGES.items():
        if is_loaded(config, name):
            try:
                made = _make(bridge, "driver_plugin", config)
            except Exception as error:
                _refuse_damage(name, bridge, error, config, items)
                unknown.warn(bridge, unknown_releases.about(bridge, error))
                continue
            if made is not None:
                yield made
                if hasattr(made, "merge"):
                    yield _Receiver(bridge, made.merge, unknown)


def refuse(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` if a plugin is used in a way that cannot work with marked tests."""
    if refused := list(refusals(config)):
        raise pytest.UsageError("\n".join(refused))


def _module(bridge: str) -> Any:
    return import_module(f"pytest_accel.features.plugins.{bridge}")


def _make(bridge: str, function: str, config: pytest.Config) -> Any:
    """Return the object that `function` of `bridge` returns; None if it has no such function."""
    module = _module(bridge)
    make = getattr(module, function, None) or getattr(module, "plugin", None)
    return None if make is None else make(config)


def _refuse_damage(
    name: str, bridge: str, error: Exception, config: pytest.Config, items: Sequence[pytest.Item]
) -> None:
    """Raise `pytest.UsageError` if tests `items` must not run with the plugin `name`, whose bridge raised `error`."""
    if isinstance(error, pytest.UsageError) or bridge not in unknown_releases.CONSEQUENCES:
        raise error
    if (text := unknown_releases.refusal(name, bridge, error, config, items)) is not None:
        raise pytest.UsageError(text) from error


class _Refusal:
    """Fails the tests of a rank that must not use the plugin `name`, whose bridge has raised an error in the rank."""

    def __init__(self, name: str, bridge: str, error: Exception) -> None:
        self._refusal = partial(unknown_releases.refusal, name, bridge, error)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if (text := self._refusal(item.config, [item])) is not None:
            pytest.fail(text, pytrace=False)


def _do_nothing(config: pytest.Config) -> None:
    pass


_LOST = ":lost"
"""End of the key under which a rank sends the error that has kept it from sending data."""
_UNKNOWN = (AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Errors of a bridge while tests run that an unknown release of its plugin may cause."""


class _Sender:
    """Sends the data of a bridge from a rank, under a key that no conftest or other plugin can use."""

    def __init__(self, bridge: str, send: Callable[[pytest.Item, pytest.TestReport], object]) -> None:
        self._key = f"{OWN_PREFIX}{bridge}"
        self._send = send
        self._fails = unknown_releases.is_needed(bridge)

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> OwnData | None:
        try:
            data = self._send(item, report)
        except _UNKNOWN as error:
            if self._fails:
                raise
            return OwnData({f"{self._key}{_LOST}": f"{type(error).__name__}: {error}"})
        return None if data is None else OwnData({self._key: data})


class _Receiver:
    """Gives a bridge in the driver the data of the bridge in the ranks."""

    def __init__(
        self,
        bridge: str,
        merge: Callable[[pytest.Item, pytest.TestReport, dict[int, Any]], None],
        unknown: unknown_releases.Warnings,
    ) -> None:
        self._bridge = bridge
        self._key = f"{OWN_PREFIX}{bridge}"
        self._merge = merge
        self._unknown = unknown
        self._fails = unknown_releases.is_needed(bridge)

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        lost = next((data[self._key + _LOST] for data in rank_data.values() if self._key + _LOST in data), None)
        if lost is not None:
            self._unknown.warn(self._bridge, unknown_releases.about(self._bridge, lost), in_test=True)
        sent = {rank: data[self._key] for rank, data in sorted(rank_data.items()) if self._key in data}
        if sent:
            try:
                self._merge(item, report, sent)
            except _UNKNOWN as error:
                if self._fails:
                    raise
                self._unknown.warn(self._bridge, unknown_releases.about(self._bridge, error), in_test=True)
