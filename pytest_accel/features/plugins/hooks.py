"""Calls of the kernel: what other plugins need in ranks and in drivers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

from pytest_accel.core.plugin_roles import with_default_roles
from pytest_accel.core.rank_data import OWN_PREFIX, OwnData
from pytest_accel.core.terminal_lines import warn
from pytest_accel.features.plugins import refusals
from pytest_accel.features.plugins.rows import ROWS, UNKNOWN_RELEASE, Row
from pytest_accel.rank.context import RANK

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.session import AccelSession


class Module(NamedTuple):
    """The functions for a plugin that needs more than a row, ``MODULE:NAME``; empty: none.

    Each is called with `config` and returns an object to register with pytest, or None. The object of a rank may have a
    method ``send(item, report)``, which returns a dict of plain data for the driver, or None. That of the driver has
    ``merge(item, report, sent)`` then, which gets what ranks have sent, by rank.
    """

    plugin: str
    """Its name (`refusals.is_loaded`)."""
    missing: str
    """The things that marked tests lack with a release without the names that the functions use."""
    in_rank: str = ""
    in_driver: str = ""
    is_needed: bool = False
    """True if marked tests must not run with such a release: all ranks would write the same files."""


MODULES = (
    Module("_pytest.junitxml", "what ranks record for --junitxml", "junit:in_rank", "junit:in_driver"),
    Module("allure_pytest.plugin", "steps, attachments and fixtures", "allure:in_rank", "allure:in_driver"),
    Module("approvaltests.integrations.pytest.pytest_plugin", "a single writer", "restrictions:approvaltests"),
    Module("inline_snapshot.pytest_plugin", "a folder of each rank", "restrictions:inline_snapshot"),
    Module("memray_manager", "recordings of each rank", "restrictions:pytest_memray"),
    Module("pytest_benchmark.plugin", "statistics, and run once", "benchmark:in_rank", "benchmark:in_driver"),
    Module("pytest_dependency", "an error of depends()", "restrictions:pytest_dependency"),
    Module("pytest_django.plugin", "databases of each rank", "restrictions:OwnDatabases", is_needed=True),
    Module("pytest_forked", "a driver that is not forked", in_driver="restrictions:pytest_forked"),
    Module("pytest_recording.plugin", "a single writer", "restrictions:pytest_recording"),
    Module("pytest_snapshot.plugin", "new snapshots", "snapshots:pytest_snapshot", "snapshots:Files", True),
    Module("syrupy", "new snapshots", "snapshots:syrupy", "snapshots:Syrupy", True),
)
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
        for plugin in _plugins(config, "in_driver", partial(refusals.is_loaded, config)):
            config.pluginmanager.register(plugin)


class _RankHooks:
    """Registers what a rank needs for other plugins, for each with its default role."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        """Do this after all plugins have been configured, and before these handle the session's start."""
        config, context = session.config, session.config.stash[RANK]
        loaded = with_default_roles(config.pluginmanager, context.absent, dict(context.session.roles))
        for plugin in _plugins(config, "in_rank", loaded.__contains__):
            config.pluginmanager.register(plugin)
        return (yield)


def _plugins(
    config: pytest.Config, side: Literal["in_rank", "in_driver"], is_loaded: Callable[[str], bool]
) -> Iterator[object]:
    """Yield what a rank or the driver registers with pytest."""
    for row in (*MODULES, *ROWS):
        if is_loaded(row.plugin):
            part: Any = row
            if isinstance(row, Module):
                name = getattr(row, side)
                try:
                    part = resolve_name(f"{__package__}.{name}")(config) if name else None
                except UNKNOWN_RELEASE as error:
                    if row.is_needed:
                        text = f"pytest-accel does not know this release of {row.plugin} ({error}), with which ranks"
                        text += f" would write the same files: switch it off with -p no:{row.plugin}"
                        raise pytest.UsageError(text) from None
                    part = _Unknown(error)
                if part is not None:
                    yield part
            yield _Passing(row, part)


class _Unknown:
    """Stands for the part of a plugin with an unknown release."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def send(self, *args: object) -> object:
        raise self._error

    merge = send


class _Passing:
    """Passes on what a plugin has collected in ranks, under a key that no conftest or other plugin can use."""

    def __init__(self, row: Module | Row, part: Any) -> None:
        self._key, self._row = f"{OWN_PREFIX}{row.plugin}", row
        self._send, self._merge = getattr(part, "send", None), getattr(part, "merge", None)
        self._has_warned = False

    def pytest_accel_rank_data(self, item: pytest.Item, report: pytest.TestReport) -> OwnData | None:
        try:
            data = None if self._send is None else self._send(item, report)
        except UNKNOWN_RELEASE as error:
            data = {"unknown": f"{type(error).__name__}: {error}"}
        return None if data is None else OwnData({self._key: data})

    def pytest_accel_merge(
        self, item: pytest.Item, report: pytest.TestReport, rank_data: dict[int, dict[str, Any]]
    ) -> None:
        sent = {rank: data[self._key] for rank, data in sorted(rank_data.items()) if self._key in data}
        error: object = next((data["unknown"] for data in sent.values() if "unknown" in data), None)
        if error is None and sent and self._merge is not None:
            try:
                self._merge(item, report, sent)
            except UNKNOWN_RELEASE as raised:
                error = raised
        if error is not None and not self._has_warned:
            self._has_warned = True
            text = f"pytest-accel does not know this release of {self._row.plugin} ({error}): marked tests lack "
            warn(text + self._row.missing)
