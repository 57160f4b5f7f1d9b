"""The pytest hooks, in the order in which pytest calls them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import hooks
from pytest_accel.core import launcher_env, preload_discovery
from pytest_accel.core.stash_keys import OUTER, RANK_PLUGIN, SESSION
from pytest_accel.fixtures import (
    accel,
    accel_world_size,
    device,
    device_mesh,
    devices,
    dist_store,
    free_port,
    gather,
    launch,
    local_rank,
    node_rank,
    process_group,
    rank,
    shared_tmp_path,
    world_size,
    world_store,
)
from pytest_accel.marks import MARKER_LINES, MarkFinder
from pytest_accel.session import WORLD_SIZE_PARAMETER, AccelSession
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.suite_adoption import Adoption

__all__ = [
    "accel",
    "accel_world_size",
    "device",
    "device_mesh",
    "devices",
    "dist_store",
    "free_port",
    "gather",
    "launch",
    "local_rank",
    "node_rank",
    "process_group",
    "rank",
    "shared_tmp_path",
    "world_size",
    "world_store",
]

_BEFORE = frozenset(sys.modules)
"""What was imported before any conftest."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Before anything of the suite is imported, and anything is captured."""
    world = None if early_config.pluginmanager.has_plugin(RANK_PLUGIN) else launcher_env.find_here()
    if world is not None and options.sees_launchers(early_config):
        from pytest_accel.nodes import launched_session

        early_config.stash[OUTER] = launched_session.enter(early_config, args, world)
    try:
        return (yield)
    except BaseException:
        if OUTER in early_config.stash:  # There will be no session that ends them.
            early_config.stash[OUTER].end(int(pytest.ExitCode.USAGE_ERROR))
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A plan collects and runs nothing: xdist starts no workers then."""
    if options.asks_for_plan(config):
        config.option.collectonly = True


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKER_LINES:
        config.addinivalue_line("markers", line)
    config.pluginmanager.register(ParametrizeHooks(), "accel-parametrize")
    if config.pluginmanager.has_plugin(RANK_PLUGIN):
        from pytest_accel.rank.context import RANK
        from pytest_accel.rank.torch_harness import HarnessInRank

        harness = HarnessInRank(config.stash[RANK])
        adopted = _adoption(config, lambda: 0, harness.install)
        if adopted is not None:
            config.pluginmanager.register(harness, "accel-harness")
            config.pluginmanager.register(adopted, "accel-adoption")
        config.pluginmanager.register(RankHooks(), "accel-bridges")
        return
    session = config.stash[SESSION] = AccelSession(config, options.settings(config))
    adopted = _adoption(config, lambda: len(session.machine.session.devices))
    if adopted is not None:
        config.pluginmanager.register(adopted, "accel-adoption")
    config.pluginmanager.register(CollectionHooks(session, adopted), "accel-collection")
    if session.worker_input is not None and "accel_schedule" in session.worker_input:
        from pytest_accel.worker_hooks import WorkerHooks

        hooks = WorkerHooks(session, session.worker_input["accel_schedule"])
        config.pluginmanager.register(hooks, "accel-schedule")
    if OUTER in config.stash:
        from pytest_accel.nodes.launcher_hooks import OuterHooks

        config.pluginmanager.register(OuterHooks(config, config.stash[OUTER]), "accel-outer")
    if not session.is_worker:
        from pytest_accel import report

        config.pluginmanager.register(report.ReportHooks(session), "accel-report")
        if options.asks_for_plan(config):
            from pytest_accel import plan_command

            config.pluginmanager.register(plan_command.PlanHooks(session), "accel-plan")
        if session.is_distributed:
            from pytest_accel.xdist_hooks import XdistHooks

            config.pluginmanager.register(XdistHooks(session), "accel-xdist")


def _adoption(
    config: pytest.Config, capacity: Callable[[], int], on_harness: Callable[[Any], None] | None = None
) -> Adoption | None:
    """Return what gives tests the marks that the ini file has for them; None if it has none."""
    if not (config.getini(options.RULES) or config.getini(options.ADOPT)):
        return None
    from pytest_accel import suite_adoption

    return suite_adoption.make(config, capacity, on_harness)


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(SESSION, None)
    if session is not None:
        session.close(politely=False)  # What an orderly end has left: nothing, unless there was none.


class ParametrizeHooks:
    """Turns a list of world sizes into one test for each."""

    def __init__(self) -> None:
        self._finder = MarkFinder()

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        mark = self._finder.find(metafunc.definition).distributed
        if mark is None:
            return
        from pytest_accel.mark_arguments import MarkError, world_sizes

        try:
            sizes = world_sizes(mark)
        except MarkError:
            return  # Every wrong mark is reported when collection has ended, all at once.
        if sizes is not None and not _has_own_sizes(metafunc):
            metafunc.fixturenames.append(WORLD_SIZE_PARAMETER)
            ids = [f"world_size={size}" for size in sizes]
            metafunc.parametrize(WORLD_SIZE_PARAMETER, sizes, ids=ids, indirect=True)


def _has_own_sizes(metafunc: pytest.Metafunc) -> bool:
    """Whether the test's own parametrization says which of the mark's sizes there are."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if "world_size" in ([name.strip() for name in names.split(",")] if isinstance(names, str) else names):
            return True
    return False


class RankHooks:
    """Registers the bridges of other plugins in a rank."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        """Register them when all plugins have been configured, and before these begin their session."""
        from pytest_accel import bridges

        for bridge in bridges.in_rank(session.config):
            session.config.pluginmanager.register(bridge)
        return (yield)


class CollectionHooks:
    """Finds the marked items of this process. Those that run them are registered only where there are some."""

    def __init__(self, session: AccelSession, adopted: Adoption | None) -> None:
        self._session = session
        self._adopted = adopted
        self._auto = "auto" in session.settings.preload
        option = session.config.option
        self._runs = not any(getattr(option, name, False) for name in ("collectonly", "setupplan", "setuponly"))
        self._considered: set[str] = set()
        self._read: set[Path] = set()
        """Files that have been read for signs of import hooks."""
        self._bridged = False
        self._hooked = False
        """True if nothing may be imported ahead of the ranks, since a finder may change it."""

    def pytest_collect_file(self, file_path: Path) -> None:
        if not self._runs or file_path.suffix != ".py":
            return
        marks = preload_discovery.marks_in(file_path)
        modules: set[str] = set()
        if self._adopted is not None:
            text = preload_discovery.text(file_path)
            marks |= self._adopted.marks_in(file_path, text)
            modules = self._adopted.imports(text) - self._considered
        # Without devices in the session, tests that only ask for devices are skipped.
        if "distributed" in marks or ("devices" in marks and self._session.session_kind is not None):
            self._look_for_hooks(file_path)
            self._session.port.warm()
            self._preload(preload_discovery.imports_of(file_path) | self._imported)
            # It asks torch for devices, which may leave a server with a driver's runtime that no rank can use.
            if self._auto and modules and self._session.session_kind in (None, "cpu", "sim"):
                self._considered |= modules
                self._session.port.preload(tuple(sorted(modules)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, Any, Any]:
        result = yield
        self._adopt(items)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Redirect marked items that a plugin has made when the collection had finished, as anyio does."""
        before = session.items.copy()
        result = yield
        if session.items != before:
            self._adopt(session.items)
        return result

    def _adopt(self, items: list[pytest.Item]) -> None:
        """Redirect the marked items that are new, and prepare what runs them."""
        config = self._session.config
        marked = self._session.adopt(items)
        if not marked or not self._runs:
            return
        if any(one.missing is None for one in marked):
            self._look_for_hooks(*(one.item.path for one in marked), collected=True)
        self._preload(self._imported)
        from pytest_accel.runtest_hooks import Graft, RunningHooks, by_world

        if self._session.settings.reorder and not self._session.is_worker:
            items[:] = by_world(items)
        if not config.pluginmanager.has_plugin("accel-running"):
            config.pluginmanager.register(RunningHooks(self._session), "accel-running")
            config.pluginmanager.register(Graft(), "accel-graft")
        self._build_bridges(marked)

    def _build_bridges(self, marked: list[MarkedItem]) -> None:
        """Register what brings other plugins' data from ranks to this process, unless that has been done.

        Nothing is refused for tests that the machine cannot run.
        """
        from pytest_accel import bridges

        config = self._session.config
        run = [one.item for one in marked if one.missing is None]
        try:
            if run:
                bridges.refuse(config)
            if not self._bridged:
                self._bridged = True
                for bridge in bridges.in_driver(config):
                    config.pluginmanager.register(bridge)
        except pytest.UsageError as error:
            self._session.refuse(str(error), run)

    @property
    def _imported(self) -> set[str]:
        """The packages that conftests and test files have imported."""
        return {name.partition(".")[0] for name in sys.modules.keys() - _BEFORE}

    def _look_for_hooks(self, *files: Path, collected: bool = False) -> None:
        """Keep the fork server from importing ahead what a finder of this session changes.

        `files` are files with tests for ranks; `collected` says that all tests have been collected.
        """
        from pytest_accel.core import import_hooks

        if self._hooked:
            return
        why = import_hooks.foreign_finder()
        plugins = self._session.config.pluginmanager.list_name_plugin()
        conftests = [Path(name) for name, _ in plugins if name.endswith("conftest.py")]
        new = set(files).union(conftests) - self._read
        self._read |= new
        if why is None and (found := next(filter(import_hooks.mentioned_in, sorted(new)), None)) is not None:
            why = f"{found} seems to install an import hook"
        if why is not None:
            self._hooked = True
            self._session.port.import_nothing_ahead(why)
        elif collected:
            self._session.port.keep_out(tuple(sorted(import_hooks.loaded_otherwise(self._session.config.rootpath))))

    def _preload(self, names: set[str]) -> None:
        new = names - self._considered
        self._considered |= new
        if self._auto and new:
            modules = preload_discovery.worth_preloading(new, self._session.config.rootpath)
            if modules:
                self._session.port.preload(modules)
