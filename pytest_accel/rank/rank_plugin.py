"""The plugin of a rank's pytest session, which serves drivers instead of collecting tests.

The session is an ordinary pytest session with the controller's arguments, so that fixtures, parametrization, plugins
and assertion rewriting work as usual.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from functools import cached_property, wraps
from os import W_OK, access, chdir, devnull
from os.path import dirname
from socket import socket
from traceback import format_exc
from typing import Any

import pytest

from pytest_accel.compat.pytest_shims import attach_log_handlers_directly
from pytest_accel.core import plugin_roles
from pytest_accel.core.device import MaskError
from pytest_accel.core.log import step
from pytest_accel.core.plugin_roles import package_of
from pytest_accel.core.session_folder import current_folder
from pytest_accel.core.stash_keys import RANK_PLUGIN
from pytest_accel.messages.rank_messages import CannotRun, CollectFile, Command, RunTest
from pytest_accel.messages.world_spec import WORKER_VARIABLES, Role
from pytest_accel.rank import coverage, device_memory, process_group, torch_devices
from pytest_accel.rank.collector import RankCollector
from pytest_accel.rank.context import RANK, RankContext
from pytest_accel.rank.debugger import RankDebugger
from pytest_accel.rank.link_to_driver import LinkToDriver
from pytest_accel.rank.rank_output import RankOutput
from pytest_accel.rank.reports import RankReports
from pytest_accel.rank.runner import TestRunner

_WRITES_A_FILE = ("debug", "pastebin")
"""pytest's options that make a session write or send a file. Only the driver does that."""
_CHANGES_THE_RUN = ("cacheclear", "maxfail", "numprocesses")
"""Options of pytest and xdist that empty the cache, and stop or distribute tests. Only the driver does that."""
_DRIVER_PLUGINS = ("lfplugin", "lfplugin-collwrapper", "nfplugin", "stepwiseplugin")
"""pytest's plugins that select or order tests and store their outcomes. Only the driver uses them."""
_PACKAGES = frozenset(
    {
        "inline_snapshot",  # Compares no snapshots.
        "pytest_bdd",  # Collects no steps for cucumber's report.
        "pytest_benchmark",  # Measures nothing.
        "pytest_jsonreport",  # Collects no metadata.
        "pytest_mpl",  # Expects the folder of the results.
        "pytest_mypy",  # Expects its settings.
        "pytest_randomly",  # Expects the seed, which is an option of ranks.
        "pytest_reportportal",  # Expects its service.
        "random_order",  # Expects the seed.
    }
)
"""Packages of plugins that work as in the main process (`MainProcessPlugins`), each with what it does in a worker."""
_HOOKS = ("pytest_configure", "pytest_sessionstart", "pytest_sessionfinish", "pytest_unconfigure")
_ATTRIBUTES = ("workerinput", "workeroutput")


class RankPlugin:
    """Pytest plugin that prepares the rank, and runs tests for one driver after another until the pool retires it.

    There is one instance in each rank.
    """

    def __init__(self, context: RankContext, role: Role) -> None:
        self.context = context
        self._output = RankOutput(context)
        self.served = False
        """True if the rank has become ready, or has told its driver why it cannot run tests."""
        self.retired = False
        self.exit_status: int | None = None
        """Exit status of the session before the hooks for its end; None if it has not ended."""
        self._role = role
        self._collector = RankCollector(context)
        self._listener = socket(fileno=role.listener)
        self._debugger = RankDebugger(self._listener, self._output)
        self._reports = RankReports(context)
        self._runner = TestRunner(context, self._collector, self._debugger, self._reports, self._output)

    def pytest_addoption(self, pluginmanager: pytest.PytestPluginManager) -> None:
        """Register the rank's plugins, after pytest's and before all others, so the others' hooks are called first.

        pytest calls this hook when it registers this plugin, the first after its own.
        """
        session = self.context.session
        coverage.start(session.coverage if session.shared else None, pluginmanager)
        plugin_roles.install(pluginmanager, dict(session.roles))
        pluginmanager.register(MainProcessPlugins())
        pluginmanager.register(self._reports)
        pluginmanager.register(self._runner, RANK_PLUGIN)
        pluginmanager.register(self._output)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_cmdline_parse(self) -> Generator[None, pytest.Config, pytest.Config]:
        """Unset the options that write files.

        The hook must be the innermost wrapper, because pytest's own wrapper opens the file of ``--debug``.
        """
        config = yield
        for name in _WRITES_A_FILE:
            if getattr(config.option, name, None):
                setattr(config.option, name, None)
        # All ranks append to the log file of the session, if this machine has its folder.
        path = self.context.session.log_file
        config.option.log_file = path if access(dirname(path), W_OK) else devnull
        config.option.log_file_mode = "a"
        # As in an xdist worker, before any hook `pytest_cmdline_main`.
        given = self.context.session.worker_input_of(self.context.spec, self.context.rank)
        vars(config).update(workerinput=given, workeroutput={})
        return config

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._collector)
        config.pluginmanager.register(self._debugger)
        config.stash[RANK] = self.context
        self.context.config = config
        option = config.option
        for name in _CHANGES_THE_RUN:
            if getattr(option, name, None):
                setattr(option, name, 0)
        if hasattr(option, "dist"):
            option.dist, option.tx = "no", []
        for name in _DRIVER_PLUGINS:
            config.pluginmanager.set_blocked(name)
        self.context.absent = plugin_roles.leave_out_absent(config.pluginmanager, dict(self.context.session.roles))

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        if self.context.rank or self.context.session.distributed:
            config.option.setupshow = False  # A worker has no terminal. The fixtures of one rank say enough.
        attach_log_handlers_directly()
        known = set(config.getini("markers"))
        for line in self.context.session.markers:
            if line not in known:
                config.addinivalue_line("markers", line)

    def pytest_internalerror(self, excrepr: Any) -> bool:
        """Keep an error for the answer to the driver; return False once that is sent, so that pytest writes it."""
        self._collector.errors.append(str(excrepr))
        return not self.served

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Collect nothing yet; return True, so that pytest does not collect. Other plugins' hooks are called before.

        If no hook of the suite has changed the current folder here, the rank enters the controller's.
        """
        spec = self.context.session
        if spec.folder is not None and current_folder() == spec.invocation_dir:
            chdir(spec.folder)
        session.items = []
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        # A rank that began without torch prepares for tests after it has imported the first test's file, which may set
        # variables that torch reads at import. If a conftest has imported torch, that may be so in some ranks only, so
        # it makes no difference.
        if self.context.began_with_torch and self._problem is not None:
            self.refuse(self._problem)
            return True
        self.served = True
        while not self.retired:
            with closing(LinkToDriver(self._listener)) as driver:
                driver.send(None)
                self._serve(session, driver)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
        self.exit_status = exitstatus
        try:
            return (yield)
        finally:
            if self.retired and self.context.store is not None:
                process_group.wait_for_other_ranks(self.context)

    def refuse(self, problem: CannotRun) -> None:
        """Wait for a driver, and send it the reason why this rank cannot run tests."""
        self.served = True
        with suppress(OSError), closing(LinkToDriver(self._listener)) as driver:
            text = "\n".join([problem.text, *self._collector.errors])
            driver.send(CannotRun(text, problem.headline))

    @cached_property
    def _problem(self) -> CannotRun | None:
        """The reason why this rank cannot run tests, or None. The first access prepares the rank for them."""
        try:
            self._prepare()
        except MaskError as error:
            return CannotRun(str(error))
        except process_group.BackendError as error:
            return CannotRun(str(error), str(error))
        except Exception:
            return CannotRun(format_exc())
        return None

    def _prepare(self) -> None:
        """Verify the devices, apply the limits, and open the store and the process group."""
        context, spec = self.context, self.context.spec
        context.is_prepared = True
        if context.visible_devices:
            torch_devices.verify(context)
            step("sees exactly its devices")
        if spec.share is not None or context.session.fractions:
            torch_devices.limit_memory(context)
        if spec.key.grouped:
            process_group.prepare(context, self._role)

    def _serve(self, session: pytest.Session, driver: LinkToDriver) -> None:
        """Run tests until this driver returns the world, by closing its connection, or the pool retires the rank."""
        while True:
            try:
                request = driver.receive()
            except (EOFError, OSError):
                # While the world is idle, or warm for later tests, other processes may use its devices.
                with suppress(Exception):  # A test that has replaced a function of torch must not cost the rank.
                    device_memory.empty_cache(self.context)
                return
            if request is Command.RETIRE:
                self.retired = True
                return
            self.context.in_test = True
            try:
                if isinstance(request, CollectFile):
                    driver.send(self._runner.collect(session, request))
                elif request is Command.PREPARE:
                    driver.send(self._problem)
                elif request is Command.TEAR_DOWN:
                    self._runner.tear_down(session, driver)
                elif isinstance(request, RunTest):
                    self._runner.run(session, driver, request)
            except (pytest.exit.Exception, KeyboardInterrupt) as error:
                driver.send(self._runner.exit_request(error))
            finally:
                self.context.in_test = False


class MainProcessPlugins:
    """Hides from some plugins, in the hooks of a session's start and end, that the process is like a worker.

    Such a plugin would do less in a process with `config.workerinput`, as xdist's workers have it, or expect data that
    it sends to workers only if there is xdist. `features/plugins` does what is right for ranks.
    """

    def __init__(self) -> None:
        self._config: pytest.Config | None = None

    def pytest_plugin_registered(self, plugin: object, manager: pytest.PytestPluginManager) -> None:
        if package_of(plugin) not in _PACKAGES:
            return
        for caller in manager.get_hookcallers(plugin) or ():
            for implementation in caller.get_hookimpls() if caller.name in _HOOKS else ():
                if implementation.plugin is plugin:
                    implementation.function = self._hiding(implementation.function)  # type: ignore[misc]

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        self._config = config

    def _hiding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: object) -> object:
            attributes = vars(self._config)
            variables = {name: os.environ.pop(name) for name in WORKER_VARIABLES if name in os.environ}
            values = {name: attributes.pop(name) for name in _ATTRIBUTES if name in attributes}
            try:
                return function(*args)
            finally:
                os.environ.update(variables)
                attributes.update(values)

        return call
