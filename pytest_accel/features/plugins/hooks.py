"""Calls of the kernel: what other plugins need in ranks and in drivers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

from pytest_accel.core.plugin_roles import module_of
from pytest_accel.core.terminal_lines import warn
from pytest_accel.features.plugins import allure, benchmark, refusals, restrictions, rows
from pytest_accel.rank.context import RANK

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession


class Module(NamedTuple):
    """The functions for a plugin that needs more than a row.

    Each is called with `config` and returns an object to register with pytest, or None. The object of a rank may have a
    method ``send(item, report)``, which returns a dict of plain data for the driver, or None. That of the driver has
    ``merge(item, report, sent)`` then, which gets what ranks have sent, by rank.
    """

    plugin: str
    """Its name (`refusals.registered_name`)."""
    in_rank: Callable[[pytest.Config], object | None]
    in_driver: Callable[[pytest.Config], object | None] = lambda config: None
    is_needed: bool = False
    """True if marked tests must not run with an unknown release: all ranks would write the same files."""


MODULES = (
    Module("_pytest.junitxml", rows.junit),
    Module("allure_pytest.plugin", allure.in_rank, allure.in_driver),
    Module("approvaltests.integrations.pytest.pytest_plugin", restrictions.approvaltests),
    Module("inline_snapshot.pytest_plugin", restrictions.inline_snapshot),
    Module("pytest_benchmark.plugin", benchmark.in_rank, benchmark.in_driver),
    Module("pytest_dependency", restrictions.pytest_dependency),
    Module("pytest_django.plugin", restrictions.OwnDatabases, is_needed=True),
    Module("pytest_recording.plugin", restrictions.pytest_recording),
    Module("pytest_snapshot.plugin", restrictions.pytest_snapshot, is_needed=True),
    Module("syrupy", restrictions.syrupy, restrictions.SyrupyInDriver, is_needed=True),
)
_REGISTERED: pytest.StashKey[bool] = pytest.StashKey()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None, object, object]:
    """Register what a rank needs for other plugins, for each with its default role.

    Do this after all plugins have been configured, and before these handle the session's start. A driver registers this
    module later.
    """
    config = session.config
    for plugin in _plugins(config, "in_rank", _with_default_roles(config).__contains__):
        config.pluginmanager.register(plugin)
    return (yield)


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
        for plugin in _plugins(config, "in_driver", partial(refusals.registered_name, config)):
            config.pluginmanager.register(plugin)


def _with_default_roles(config: pytest.Config) -> set[str]:
    """Return the names and modules of the loaded plugins to which the user has given no other role."""
    context = config.stash[RANK]
    modules = {module: module for module in context.absent}
    for name, plugin in config.pluginmanager.list_name_plugin():
        if plugin is not None:
            modules[name] = modules[getattr(plugin, "__name__", name)] = module_of(plugin)
    chosen = dict(context.session.roles)
    return {name for name, module in modules.items() if chosen.keys().isdisjoint((module, module.partition(".")[0]))}


def _plugins(
    config: pytest.Config, side: Literal["in_rank", "in_driver"], is_loaded: Callable[[str], object]
) -> Iterator[object]:
    """Yield what a rank or the driver registers with pytest."""
    for row in rows.ROWS:
        if is_loaded(row.plugin):
            yield _Passing(row.plugin, row, None)
    for module in MODULES:
        if not is_loaded(module.plugin):
            continue
        part = problem = None
        try:
            part = getattr(module, side)(config)
        except rows.UNKNOWN_RELEASE as error:
            if module.is_needed:
                text = f"{_unknown(module.plugin, error)}, with which ranks would write the same files"
                option = f"-p no:{refusals.registered_name(config, module.plugin)}"
                raise pytest.UsageError(f"{text}: switch it off with {option}") from None
            problem = error
        if part is not None:
            yield part
        yield _Passing(module.plugin, part, problem)


def _unknown(plugin: str, error: Exception) -> str:
    return f"pytest-accel does not know this release of {plugin} ({type(error).__name__}: {error})"


class _Passing:
    """Passes on what a plugin has collected in ranks, under a key that no conftest or other plugin can use."""

    def __init__(self, plugin: str, part: Any, problem: Exception | None) -> None:
        """`problem` is the error of a release that lacks names which are used, if there was one."""
        self._key, self._plugin, self._problem = f"pytest_accel:{plugin}", plugin, problem
        self._send, self._merge = getattr(part, "send", None), getattr(part, "merge", None)
        self._has_warned = False

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> dict[str, Any] | None:
        data = self._call(self._send, item, report)
        return None if data is None else {self._key: data}

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        if sent := {rank: data[self._key] for rank, data in sorted(rank_data.items()) if self._key in data}:
            self._call(self._merge, item, report, sent)

    def _call(self, function: Callable[..., Any] | None, *arguments: object) -> Any:
        """Return the result of `function`, or None; warn once if the release of the plugin is unknown."""
        try:
            if self._problem is not None:
                raise self._problem
            return None if function is None else function(*arguments)
        except rows.UNKNOWN_RELEASE as error:
            if not self._has_warned:
                self._has_warned = True
                text = _unknown(self._plugin, error)
                warn(f"{text}: marked tests may lack its data, or write its files on each rank")
