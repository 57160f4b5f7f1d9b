"""Bridges to other plugins: they bring the data that a plugin collects in ranks to the driver, which reports it.

A plugin has a bridge if without one its data would be destroyed or a verdict would be wrong (snapshots, selection,
ranks that share a database), or if very many suites use it. Other plugins that collect data in ranks lose it; the two
hooks of `pytest_accel/hooks.py` bring it to the driver from a conftest, as docs/reference/plugins.md shows. Uses that
cannot work without a bridge are refused by the table in `refusals.py`.

There is one module for each supported plugin. It is imported only in sessions that have marked tests and have loaded
that plugin. A rank does not use the bridge if `accel_rank_plugins` gives the plugin another role than the bridge
expects. A module has one or both of

- ``rank_plugin(config)``, called in a rank when all plugins have been configured, and
- ``driver_plugin(config)``, called in the driver when its first marked tests have been collected. It may raise
  `pytest.UsageError` to refuse a use of the plugin that does not work with ranks,

or in place of both ``plugin(config)``, called in ranks and in the driver. Each returns None, or an object to register
with pytest. If it raises another error, the release of the plugin is unknown. The session goes on without the bridge
where ``WITHOUT`` of the module says that this does no damage (`unknown_releases.py`; pytest's own report has none); a
rank then calls ``without_bridge(config)`` of the module, if it has this function. Two methods of the object are called
in addition to its hooks:

- ``send(item, report)`` in a rank, for each phase that it reports, returns plain data for the driver, or None.
- ``merge(item, report, sent)`` in the driver, for each phase in which a rank has sent data: `sent` has the data by
  rank, in the order of the ranks. It may change `report`.

The bridges use pytest's hooks and the two hooks of `pytest_accel/hooks.py`. Their tests are in
``tests/features/plugins``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

import pytest

from pytest_accel.core.plugin_roles import with_default_roles
from pytest_accel.core.rank_data import OWN_PREFIX, OwnData
from pytest_accel.features.plugins.refusals import is_loaded, refusals
from pytest_accel.features.plugins.unknown_releases import Warnings, WithoutBridge
from pytest_accel.rank.context import RANK

BRIDGES: Mapping[str, str] = MappingProxyType(
    {
        "_hypothesis_pytestplugin": "hypothesis_results",
        "_pytest.junitxml": "junit",
        "allure_pytest.plugin": "allure",
        "approvaltests.integrations.pytest.pytest_plugin": "approvals",
        "ctrf.main": "ctrf",
        "inline_snapshot.pytest_plugin": "inline_snapshot",
        "memray_manager": "memray",
        "pytest_bdd.plugin": "bdd",
        "pytest_benchmark.plugin": "benchmark",
        "pytest_dependency": "dependency",
        "pytest_django.plugin": "django",
        "pytest_forked": "forked",
        "pytest_html.plugin": "html",
        "pytest_jsonreport.plugin": "json_report",
        "pytest_metadata.plugin": "metadata",
        "pytest_order.plugin": "pytest_order",
        "pytest_recording.plugin": "recording",
        "pytest_snapshot.plugin": "pytest_snapshot",
        "syrupy": "syrupy",
        "testmon.pytest_testmon": "testmon",
    }
)
"""The module of a plugin's bridge, by the name of the plugin (`refusals.is_loaded`)."""


def in_rank(config: pytest.Config) -> Iterator[object]:
    """Yield the plugins of a rank: for each plugin that it has loaded or left out, if it has its default role."""
    context = config.stash[RANK]
    plugins = with_default_roles(config.pluginmanager, context.absent, dict(context.session.roles))
    for name, bridge in BRIDGES.items():
        if name in plugins:
            module = _module(bridge)
            without = _without(module)
            try:
                made = _make(module, "rank_plugin", config)
            except Exception as error:
                # The driver has found this, too: it has refused the plugin, or warned.
                if without is None:
                    raise
                getattr(module, "without_bridge", _do_nothing)(config)
                yield _Refusal(name, without, error)
                continue
            if made is not None:
                yield made
                if hasattr(made, "send"):
                    yield _Sender(bridge, without, made.send)


def in_driver(config: pytest.Config, items: Sequence[pytest.Item]) -> Iterator[object]:
    """Yield the plugins of the driver, in which `items` are marked. Raise `pytest.UsageError` to refuse a plugin."""
    warnings = Warnings(config)
    for name, bridge in BRIDGES.items():
        if is_loaded(config, name):
            module = _module(bridge)
            without = _without(module)
            try:
                made = _make(module, "driver_plugin", config)
            except Exception as error:
                if without is None or isinstance(error, pytest.UsageError):
                    raise
                if (text := without.refusal(name, error, config, items)) is not None:
                    raise pytest.UsageError(text) from error
                warnings.warn(without, error)
                continue
            if made is not None:
                yield made
                if hasattr(made, "merge"):
                    yield _Receiver(bridge, without, made.merge, warnings)


def refuse(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Raise `pytest.UsageError` if a plugin is used in a way that cannot work with the marked tests `items`."""
    if refused := list(refusals(config, items)):
        raise pytest.UsageError("\n".join(refused))


def _module(bridge: str) -> Any:
    return import_module(f"pytest_accel.features.plugins.{bridge}")


def _without(module: Any) -> WithoutBridge | None:
    """Return the consequence of an unknown release; None for pytest's own report."""
    without: WithoutBridge | None = getattr(module, "WITHOUT", None)
    return without


def _make(module: Any, function: str, config: pytest.Config) -> Any:
    """Return the object that `function` of a bridge's `module` returns; None if it has no such function."""
    make = getattr(module, function, None) or getattr(module, "plugin", None)
    return None if make is None else make(config)


class _Refusal:
    """Fails the tests of a rank that must not use the plugin `name`, whose bridge has raised `error` in the rank."""

    def __init__(self, name: str, without: WithoutBridge, error: Exception) -> None:
        self._name = name
        self._without = without
        self._error = error

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if (text := self._without.refusal(self._name, self._error, item.config, [item])) is not None:
            pytest.fail(text, pytrace=False)


def _do_nothing(config: pytest.Config) -> None:
    pass


_LOST = ":lost"
"""End of the key under which a rank sends the error that has kept it from sending data."""
_UNKNOWN = (AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Errors of a bridge while tests run that an unknown release of its plugin may cause."""


def _fails(without: WithoutBridge | None) -> bool:
    """Return whether an error of a bridge while a test runs must fail the test: otherwise only data is missing."""
    return without is None or bool(without.damage)


class _Sender:
    """Sends the data of a bridge from a rank, under a key that no conftest or other plugin can use."""

    def __init__(
        self,
        bridge: str,
        without: WithoutBridge | None,
        send: Callable[[pytest.Item, pytest.TestReport], object],
    ) -> None:
        self._key = f"{OWN_PREFIX}{bridge}"
        self._send = send
        self._fails = _fails(without)

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
        without: WithoutBridge | None,
        merge: Callable[[pytest.Item, pytest.TestReport, dict[int, Any]], None],
        warnings: Warnings,
    ) -> None:
        self._without = without
        self._key = f"{OWN_PREFIX}{bridge}"
        self._merge = merge
        self._warnings = warnings
        self._fails = _fails(without)

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        lost = next((data[self._key + _LOST] for data in rank_data.values() if self._key + _LOST in data), None)
        if lost is not None:
            self._warn(lost)
        sent = {rank: data[self._key] for rank, data in sorted(rank_data.items()) if self._key in data}
        if sent:
            try:
                self._merge(item, report, sent)
            except _UNKNOWN as error:
                if self._fails:
                    raise
                self._warn(error)

    def _warn(self, error: Exception | str) -> None:
        assert self._without is not None
        self._warnings.warn(self._without, error, in_test=True)
