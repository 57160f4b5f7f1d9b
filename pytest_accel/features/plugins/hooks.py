"""Calls of the kernel: what other plugins need in ranks and in drivers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_accel.core.plugin_roles import with_default_roles
from pytest_accel.core.rank_data import OWN_PREFIX, OwnData
from pytest_accel.features.plugins import refusals
from pytest_accel.features.plugins.rows import UNKNOWN_RELEASE
from pytest_accel.rank.context import RANK

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession


class Module(NamedTuple):
    """A module for a plugin. It has the functions ``in_rank(config)`` and ``in_driver(config)``.

    Each returns an object to register with pytest, or None. The object's method ``send(item, report)`` returns plain
    data for the driver, or None; ``merge(item, report, sent)`` gets what ranks have sent, by rank.
    """

    name: str
    missing: str = ""
    """The data that marked tests lack with a release without the names that the module uses."""
    damage: str = ""
    """Why such a release is refused; empty: it is not."""
    applies: refusals.Condition = lambda config, items: True
    """Returns True if `damage` applies to a session."""


_UNSTORED = "snapshots of marked tests would be written or removed by each rank"
_USES_SNAPSHOT = refusals.uses("snapshot")
MODULES = {
    "_pytest.junitxml": Module("junit", "what ranks record for --junitxml"),
    "allure_pytest.plugin": Module("allure", "steps, attachments and fixtures"),
    "inline_snapshot.pytest_plugin": Module("inline_snapshot", damage=_UNSTORED),
    "pytest_benchmark.plugin": Module("benchmark", "the statistics, and their functions run once"),
    "pytest_django.plugin": Module("django", damage="ranks would share their test databases"),
    "pytest_snapshot.plugin": Module("pytest_snapshot", damage=_UNSTORED, applies=_USES_SNAPSHOT),
    "syrupy": Module("syrupy", damage=_UNSTORED, applies=_USES_SNAPSHOT),
}
"""The modules, by the plugins' names (`refusals.is_loaded`)."""
_warned: set[str] = set()
"""The plugins about whose releases this process has warned."""
_REGISTERED: pytest.StashKey[bool] = pytest.StashKey()


def pytest_accel_configure_rank(config: pytest.Config) -> None:
    config.pluginmanager.register(_RankHooks(), "accel-plugins")


def pytest_accel_redirected(session: AccelSession, items: list[pytest.Item], redirected: Sequence[MarkedItem]) -> None:
    """Register what receives other plugins' data from ranks, unless that has been done.

    Refuse plugins that do not work with ranks, unless this machine can run none of the `redirected` tests.
    """
    config = session.config
    runnable = [marked.item for marked in redirected if marked.missing is None]
    if runnable and (refused := list(refusals.refusals(config, runnable))):
        raise pytest.UsageError("\n".join(refused))
    if not config.stash.get(_REGISTERED, False):
        config.stash[_REGISTERED] = True
        for plugin in _in_driver(config, runnable):
            config.pluginmanager.register(plugin)


class _RankHooks:
    """Registers what a rank needs for other plugins."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        """Do this after all plugins have been configured, and before these handle the session's start."""
        for plugin in _in_rank(session.config):
            session.config.pluginmanager.register(plugin)
        return (yield)


def _in_rank(config: pytest.Config) -> Iterator[object]:
    """Yield the plugins of a rank: for each plugin that it has loaded or left out, if it has its default role."""
    from pytest_accel.features.plugins import restrictions, rows

    context = config.stash[RANK]
    loaded = with_default_roles(config.pluginmanager, context.absent, dict(context.session.roles))
    for name, restrict in restrictions.RESTRICTIONS.items():
        if name in loaded and (restriction := restrict(config)) is not None:
            yield restriction
    for name, module in MODULES.items():
        if name in loaded:
            try:
                plugin = _import(module).in_rank(config)
            except UNKNOWN_RELEASE as error:  # The driver has found this, too: it has refused the plugin, or warned.
                plugin = _Refused(module, name, error) if module.damage else None
            if plugin is not None:
                yield plugin
            if hasattr(plugin, "send"):
                yield _Sender(name, plugin.send)
    yield from (_Sender(row.plugin, row.send) for row in rows.ROWS if row.plugin in loaded)


def _in_driver(config: pytest.Config, items: Sequence[pytest.Item]) -> Iterator[object]:
    """Yield the plugins of the driver, in which `items` are marked. Raise `pytest.UsageError` to refuse a plugin."""
    from pytest_accel.features.plugins import restrictions, rows

    restrictions.keep_from_forking(config)
    for name, module in MODULES.items():
        if refusals.is_loaded(config, name):
            try:
                plugin = _import(module).in_driver(config)
            except UNKNOWN_RELEASE as error:
                if not module.damage:
                    _warn(name, module.missing, error)
                elif module.applies(config, items):
                    raise pytest.UsageError(_refusal(module, name, error)) from error
                continue
            if plugin is not None:
                yield plugin
            if hasattr(plugin, "merge"):
                yield _Receiver(name, plugin.merge, module.missing)
    for row in rows.ROWS:
        if refusals.is_loaded(config, row.plugin):
            try:
                row.check()
            except UNKNOWN_RELEASE as error:
                _warn(row.plugin, row.missing, error)
            yield _Receiver(row.plugin, row.merge, row.missing)


def _import(module: Module) -> Any:
    return import_module(f"pytest_accel.features.plugins.{module.name}")


def _refusal(module: Module, plugin: str, error: Exception) -> str:
    text = f"pytest-accel does not know this release of {plugin} ({error}): {module.damage}"
    return f"{text}; switch it off with -p no:{plugin}"


class _Refused:
    """Fails the tests of a rank that use a plugin which would do damage."""

    def __init__(self, module: Module, plugin: str, error: Exception) -> None:
        self._applies = module.applies
        self._text = _refusal(module, plugin, error)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._applies(item.config, [item]):
            pytest.fail(self._text, pytrace=False)


class _Sender:
    """Sends the data of a plugin from a rank, under a key that no conftest or other plugin can use."""

    def __init__(self, plugin: str, send: Callable[[pytest.Item, pytest.TestReport], object]) -> None:
        self._key = f"{OWN_PREFIX}{plugin}"
        self._send = send

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> OwnData | None:
        data = self._send(item, report)
        return None if data is None else OwnData({self._key: data})


class _Receiver:
    """Adds the data that ranks have sent to what the plugin has in the driver."""

    def __init__(self, plugin: str, merge: Callable[..., None], missing: str) -> None:
        self._plugin = plugin
        self._key = f"{OWN_PREFIX}{plugin}"
        self._merge = merge
        self._missing = missing

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        sent = {rank: data[self._key] for rank, data in sorted(rank_data.items()) if self._key in data}
        if not sent:
            return
        try:
            self._merge(item, report, sent)
        except UNKNOWN_RELEASE as error:
            if not self._missing:
                raise
            _warn(self._plugin, self._missing, error)


def _warn(plugin: str, missing: str, error: Exception) -> None:
    """Warn once that `missing` is missing for marked tests, since `error` was raised."""
    if plugin in _warned:
        return
    _warned.add(plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # A suite whose warnings are errors must not fail.
        text = f"pytest-accel does not know this release of {plugin} ({error}): marked tests lack {missing}"
        warnings.warn(pytest.PytestWarning(text), stacklevel=2)
