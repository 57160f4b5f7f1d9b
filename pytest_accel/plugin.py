"""The plugin's entry point: hooks in the order in which pytest calls them."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import features, fixtures, hooks
from pytest_accel.core.marks import (
    MARKER_LINES,
    NEEDS,
    MarkOwners,
    Marks,
    closest_marks,
    deselected_marks,
    has_list,
    marks_in,
)
from pytest_accel.core.source_files import GIVEN_OPTIONS, PlaceRecorder, record_file, restore_in_worker, text_of
from pytest_accel.core.stash_keys import (
    DRIVER_LEASES,
    LAUNCHED,
    MARKED,
    NOT_RUN,
    OWNERS,
    SESSION,
    SKIPPED_FILES,
    is_rank,
    is_xdist_worker,
)
from pytest_accel.session import AccelSession
from pytest_accel.settings import options

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.item_redirection import Redirector

_MOST_WORKERS = 64
"""Maximum number of workers that ``-n auto`` starts for the devices of a cluster: each is a process of this machine."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hooks)
    # For `pytest_plugins`, pytest would read the metadata of all installed packages, which takes several milliseconds.
    pluginmanager.register(fixtures, fixtures.__name__)


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, object, object]:
    """Meet the other processes of this process's launcher, before imports of the suite and capturing.

    In all of these processes but rank 0, this raises ``SystemExit`` when the session has ended.
    """
    if GIVEN_OPTIONS in os.environ:
        restore_in_worker()
    in_rank = is_rank(early_config)
    if not in_rank:  # A rank has begun to write its steps earlier.
        steps = options.output_path(early_config, options.LOG)
        if steps is not None or "PYTEST_ACCEL_LOG" in os.environ:
            _start_log(early_config, steps)
        features.register(early_config, "start")
        early_config.hook.pytest_accel_start(early_config=early_config, args=args)
    # Not in a worker: the controller may have begun to write the files.
    if not is_xdist_worker() and not in_rank:
        for option in options.FILES:
            if (path := options.output_path(early_config, option)) is not None:
                options.remove_output(path, option)  # If a conftest fails, no later hook is called.
    try:
        return (yield)
    except BaseException:
        if LAUNCHED in early_config.stash:  # No session starts that would end the agents.
            early_config.stash[LAUNCHED].end(int(pytest.ExitCode.USAGE_ERROR))
        raise


def _start_log(early_config: pytest.Config, path: str | None) -> None:
    """Write the steps of this process to the file of ``--accel-log``."""
    from pytest_accel.core import launcher_env, log

    alone = not is_xdist_worker() and launcher_env.find_here() is None
    if path is not None and alone and not log.is_on():
        options.remove_output(path, options.LOG)
    log.start_session(early_config, path)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the number of the cluster's devices as the number of workers for ``-n auto``. A rank has no workers.

    xdist calls this before the plugins are configured.
    """
    if is_rank(config):
        return 0
    session = _session(config)
    if session.settings.cluster is None or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return min(len(session.machine.session.devices), _MOST_WORKERS) or None


def _session(config: pytest.Config) -> AccelSession:
    """Return the session of `config`; make it if there is none yet."""
    session: AccelSession | None = config.stash.get(SESSION, None)
    if session is None:
        session = config.stash[SESSION] = AccelSession(config, options.settings(config))
        # No-op after a clean shutdown. A usage error may end the session before it is configured.
        config.add_cleanup(partial(session.close, gracefully=False))
    return session


def pytest_configure(config: pytest.Config) -> None:
    in_rank = is_rank(config)
    owner = None if in_rank else _session(config).settings.marks
    owners = config.stash[OWNERS] = MarkOwners(lambda: config.getini("markers"), owner)
    adopts = config.getini(options.RULES) or config.getini(options.ADOPT)
    for line in MARKER_LINES:
        # Rules need the marks also where the project has its own.
        if adopts or not any(line.startswith(f"{name}(") for name in owners.of_project):
            config.addinivalue_line("markers", line)
    if not in_rank:
        config.pluginmanager.register(CollectionHooks(_session(config)), "accel-collection")
    config.pluginmanager.register(PlaceRecorder(), "accel-places")  # After the hooks that divide what it records.
    if in_rank:
        features.register(config, "configure_rank")
        config.hook.pytest_accel_configure_rank(config=config)
        return
    session = _session(config)
    config.pluginmanager.register(UnmarkedTestHooks(session), "accel-unmarked-tests")
    if not session.is_worker:
        from pytest_accel import report

        config.pluginmanager.register(report.ReportHooks(session), "accel-report")
        if options.is_distributed(config):
            from pytest_accel.xdist_hooks import XdistHooks

            config.pluginmanager.register(XdistHooks(session), "accel-xdist")
    features.register(config, "configure")
    config.hook.pytest_accel_configure(session=session)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let fixtures of other plugins win: their users have relied on them before they installed this plugin."""
    if any(_has_fixture_of_ours(plugin) for _, plugin in session.config.pluginmanager.list_name_plugin()):
        from pytest_accel.compat.pytest_shims import prefer_other_fixtures

        prefer_other_fixtures(session, fixtures.FIXTURES)


def _has_fixture_of_ours(plugin: object) -> bool:
    """Return whether `plugin` is another plugin, and has a fixture of the same name as a fixture of this plugin."""
    if plugin is fixtures:
        return False
    members = (*vars(type(plugin)).values(), *getattr(plugin, "__dict__", {}).values())
    # Not isinstance(): it asks lazy objects of conftests for their class, and so may load something or raise an error.
    return any(type(one) is type(fixtures.accel) and one.name in fixtures.FIXTURES for one in members)


class UnmarkedTestHooks:
    """Explains failures of tests without a mark that do what only a distributed test can do. Not used in ranks.

    Also finds a test that leaves a device unusable for this process, and fails a test whose marks have changed since
    its collection: it would run in one process, and could pass there. Such a failure stands also with a mark xfail.
    """

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._unusable = ""
        """The sentence about a test that has left a device unusable. The failures of later tests have it."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Compare marks before the call, since fixtures and hooks may add marks, and after it, since the test may."""
        __tracebackhide__ = True
        _check_marks(item)
        result = yield
        if MARKED not in item.stash:  # The call of a marked test is in other processes.
            _check_marks(item)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and getattr(call.excinfo.value, NOT_RUN, None) is True:
            from pytest_accel.verdict import phase_verdict

            phase_verdict.report_not_run(report)
        if MARKED in item.stash:
            return report  # The test runs in ranks.
        if self._unusable and report.failed:
            report.sections.append(("accel: unusable device", self._unusable))
        if call.when == "teardown" and not self._unusable and "torch" in sys.modules:
            from pytest_accel import unmarked_tests

            if not self._session.is_forked_copy and (error := unmarked_tests.device_error(sys.modules["torch"])):
                self._unusable = f"{item.nodeid} has left a device unusable for this process: {error}"
        return report

    # No wrapper: pytest's own hook, which is called first, sets the exception of a unittest.TestCase.
    @pytest.hookimpl(specname="pytest_runtest_makereport")
    def pytest_explain_exception(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Explain the exception of a phase before pytest makes its report."""
        if call.excinfo is not None and MARKED not in item.stash:
            from pytest_accel.compat import torch_errors
            from pytest_accel.compat.pytest_shims import filter_frames
            from pytest_accel.core.missing_mark import name_place

            error, about_marks = call.excinfo.value, None
            if any(closest_marks(item)):
                from pytest_accel import unmarked_tests

                about_marks = unmarked_tests.about_marks(item, item.config.stash[OWNERS])
            name_place(error, item, about_marks)
            if (hint := torch_errors.explain(error, grouped=False, about_marks=about_marks)) is not None:
                torch_errors.add_hint(error, hint)
                filter_frames(item, torch_errors.MODULES)

    def pytest_exception_interact(
        self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any], report: Any
    ) -> None:
        """Explain the error of a file that cannot be collected; pytest has made its report already."""
        if isinstance(node, pytest.Collector) and call.excinfo is not None:
            from pytest_accel.compat import torch_errors

            error = call.excinfo.value
            # The other explanations are for tests without a mark.
            if isinstance(error, KeyError) and (explanation := torch_errors.explain(error, grouped=False)) is not None:
                with suppress(AttributeError):  # Another plugin may have put in a failure of its own.
                    report.longrepr.addsection("accel", explanation)


def _check_marks(item: pytest.Item) -> None:
    """Raise an error if the marks of `item` have changed since it was collected."""
    marked: MarkedItem | None = item.stash.get(MARKED, None)
    planned = Marks() if marked is None else marked.marks
    if (present := closest_marks(item, item.config.stash[OWNERS])) != planned:
        from pytest_accel import unmarked_tests

        unmarked_tests.fail_changed(item, planned, present)


class CollectionHooks:
    """Finds the marked items of this process, and has the fork server start during collection. Not used in ranks.

    Registers the hooks that run marked items when it finds the first, so that other sessions do not import these hooks.
    """

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._owners: MarkOwners = session.config.stash[OWNERS]
        option = session.config.option
        self._runs_tests = not any(getattr(option, name, False) for name in ("collectonly", "setupplan"))
        self._deselected_marks = deselected_marks(getattr(option, "markexpr", ""))
        self._redirector: Redirector | None = None
        """The object that redirects marked items; None before the first marked item."""
        self._has_modified_items = False
        """True after the hooks that may modify the list of items, unless one of them has raised an exception."""

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Start the fork server if a file is about to be collected whose text has marks of this plugin.

        `pytest_collect_file` would be too early: pytest calls it for all files in the folder of a file that the command
        line names.
        """
        if not self._runs_tests or not isinstance(collector, pytest.File):
            return
        text = record_file(collector)
        if collector.path.suffix != ".py":
            return
        marks = self._marks_of(collector.path, text)
        # If the session has no devices, tests that only request devices are skipped and need no fork server.
        if "distributed" in marks or ("devices" in marks and self._session.machine.session.devices):
            self._session.pool_client.warm()

    def _marks_of(self, path: Path, text: str) -> set[str]:
        """Return the marks that tests in the file seem to have, judged by its `text`."""
        config = self._session.config
        marks = marks_in(text) - self._owners.of_project
        marks = marks.union(*config.hook.pytest_accel_marks_of_file(config=config, path=path, text=text))
        return marks - self._deselected_marks

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Divide tests by lists before the wrapper of ``--lf``, and pytest's own code, compare their names.

        Note a file that skips itself since only ranks have a variable.
        """
        report = yield
        is_skipped = report.skipped and isinstance(collector, pytest.Module)
        if is_skipped and "distributed" in self._marks_of(collector.path, text_of(collector.path)):
            from pytest_accel.driver.skip_conditions import condition_of

            if (condition := condition_of(report.longrepr, collector.config.rootpath)) is not None:
                self._session.skipped_files.append(f"{condition}: the whole file {collector.nodeid}")
        self._divide(report.result or [], selectable=True)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self) -> Generator[None, Any, Any]:
        result = yield
        self._has_modified_items = True
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Divide and redirect marked items once all hooks have modified the list of items and added marks.

        Redirect afterwards those that another plugin creates in this hook, as anyio does. They take the place of items
        of this session's part of the suite, so they are not divided into parts again.
        """
        if self._has_modified_items:
            self._divide(session.items)
            self._redirect(session.items, self._session.settings.shard)
        if self._redirector is not None or any(DRIVER_LEASES in item.stash for item in session.items):
            session.config.hook.pytest_accel_collection_finished(session=self._session, items=session.items)
        before = session.items.copy()
        result = yield
        if session.items != before:
            self._redirect(session.items, None)  # Not divided: an xdist worker has sent its list of tests.
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        output: dict[str, Any] | None = getattr(self._session.config, "workeroutput", None)
        if output is not None and self._session.skipped_files:
            output[SKIPPED_FILES] = self._session.skipped_files

    def _divide(self, nodes: list[Any], *, selectable: bool = False) -> None:
        """Put tests for the entries of lists in place of tests that have a list in their mark, and were not divided."""
        config = self._session.config
        if any(has_list(closest_marks(node, self._owners).distributed) for node in nodes):
            features.register(config, "lists")
            config.hook.pytest_accel_divide(config=config, nodes=nodes, selectable=selectable)

    def _redirect(self, items: list[pytest.Item], shard: tuple[int, int] | None) -> None:
        """Make new marked items run in worlds, and register the hooks that run them.

        Deselect items that do not meet ``--accel-select`` or, with `shard`, belong to another part of the suite.
        """
        config = self._session.config
        found = {item: marks for item in items if any(marks := closest_marks(item, self._owners))}
        wrong: dict[pytest.Item, str] = {}
        # Without any other mark of the plugin, `needs` may be a mark of a suite that does not use the plugin.
        may_need = found or options.find(config, options.RESOURCES) is not None
        if may_need and any(item.get_closest_marker(NEEDS) is not None for item in items):
            features.register(config, "needs")
            wrong = config.hook.pytest_accel_read_needs(session=self._session, items=items) or {}
        if wrong:
            from pytest_accel.item_redirection import make_fail

            for item, text in wrong.items():
                make_fail(item, text)
                found.pop(item, None)
        if not found and self._session.settings.select is None and self._session.settings.shard is None:
            return
        if self._redirector is None:
            from pytest_accel.item_redirection import Redirector

            self._redirector = Redirector(self._session)
        config.hook.pytest_accel_select(
            session=self._session, items=items, found=found, redirector=self._redirector, shard=shard
        )
        redirected = self._redirector.redirect(items, [(item, found[item]) for item in items if item in found])
        if not redirected or not self._runs_tests:
            return
        if not config.pluginmanager.is_registered(self._redirector):
            config.pluginmanager.register(self._redirector, "accel-runtest")
        features.register(config, "marked")
        try:
            config.hook.pytest_accel_redirected(session=self._session, items=items, redirected=redirected)
        except pytest.UsageError as error:
            runnable = [marked.item for marked in redirected if marked.missing is None]
            self._redirector.refuse(str(error), runnable)
