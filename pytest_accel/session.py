"""State of the plugin in one pytest process: settings, machine, access to the pool, driver of the marked items."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from os import getpid
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.launcher_env import without_local_rank
from pytest_accel.core.marks import MarkFinder, Marks
from pytest_accel.core.preload_discovery import installed_plugins
from pytest_accel.core.stash_keys import MARKED, OUTER
from pytest_accel.settings.options import Settings, is_distributed, planned_machine

if TYPE_CHECKING:
    from pytest_accel.core.session_spec import SessionSpec
    from pytest_accel.core.world_key import Traits, WorldKey
    from pytest_accel.diagnostics.diagnosis import Interrupted
    from pytest_accel.driver.driver import Driver
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.hardware.inventory import Inventory, Machine
    from pytest_accel.nodes.launched_session import OuterSession
    from pytest_accel.pool.pool import Pool
    from pytest_accel.pool.pool_client import Port
    from pytest_accel.rank.coverage import DriverCoverage

WORLD_SIZE_PARAMETER = "accel_world_size"
"""Name of the parameter that a list of world sizes in a mark adds to a test."""


class AccelSession:
    """The plugin's objects in one driver or controller; stored on the config under `stash_keys.SESSION`.

    Machine, pool, port and driver are created on first use, so that a session without marks creates none of them.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self._pid = getpid()
        self._pool_lock = threading.Lock()
        self._pool: Pool | None = None
        self._coverage: DriverCoverage | None = None
        self._port: Port | None = None
        self._driver: Driver | None = None
        self.held: set[pytest.Item] = set()
        """Tests on hold: xdist has sent them to this worker, which skips them until the controller orders their run."""
        self._server_turns = itertools.count()
        self.usage_error: str | None = None
        """Message of a worker whose tests request something impossible; set in the controller."""

    @property
    def worker_input(self) -> dict[str, Any] | None:
        """The data that xdist's controller has sent to this worker; None in a process that is not a worker."""
        return getattr(self.config, "workerinput", None)

    @property
    def is_forked_copy(self) -> bool:
        """True in a process forked from the session's, such as a child of a test that has returned from the test."""
        return getpid() != self._pid

    @property
    def is_worker(self) -> bool:
        """True if this process is an xdist worker."""
        return self.worker_input is not None

    @cached_property
    def machine(self) -> Machine:
        """The devices of this machine, or of the one that ``--accel-plan`` assumes; a worker uses the controller's.

        Access raises :class:`pytest.UsageError` if the settings do not fit the machine.
        """
        if self.worker_input is not None:
            received: Machine = pickle.loads(self.worker_input["accel_machine"])
            return received
        if (planned := planned_machine(self.config)) is not None:
            from pytest_accel.hardware.hypothetical_machine import PretendedMachine

            return PretendedMachine(*planned)
        from pytest_accel.settings.machine import machine_for

        try:
            machine = machine_for(self.settings)
            _ = machine.session
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        return machine

    @property
    def pool(self) -> Pool:
        """The session's pool; only in the controller.

        The lock is needed because the threads that receive the workers' requests use this property, too.
        """
        with self._pool_lock:
            if self._pool is None:
                from pytest_accel.core.shims import base_temporary_directory
                from pytest_accel.hardware.vendors.cpu import cpu_slots
                from pytest_accel.pool.pool import Pool
                from pytest_accel.rank import coverage

                spec = _session_spec(self.config, self.settings, self.machine)
                measuring = coverage.of_this_process(self.config)
                if measuring is not None and (why := coverage.shortcoming(measuring)) is not None:
                    self.show(f"accel: {why}")
                elif measuring is not None:
                    self._coverage = coverage.DriverCoverage(measuring, base_temporary_directory(self.config))
                    children = coverage.for_children(os.environ)
                    spec = replace(spec, coverage=self._coverage.settings, hidden=(*spec.hidden, *children))
                waits = self.settings.busy == "wait"
                self._pool = Pool(
                    self.machine, spec, cpu_slots(), _on_wanted, waits_for_busy=waits, **self._launcher_arguments()
                )
            return self._pool

    def _launcher_arguments(self) -> dict[str, Any]:
        """Return the arguments of the pool that describe the launched processes; none without a launcher."""
        if self.outer is None:
            return {}
        return {"servers": self.outer.servers, "layout": self.outer.layout, "far": self.outer.supplies}

    @property
    def outer(self) -> OuterSession | None:
        """The other processes that a launcher has started with this one; None without a launcher."""
        return self.config.stash.get(OUTER, None)

    @property
    def port(self) -> Port:
        """This process's access to the pool, which is in the controller."""
        if self._port is None:
            from pytest_accel.pool.pool_client import LocalPort, RemotePort

            if self.worker_input is not None:
                self._port = RemotePort(self.worker_input["accel_channel"])
            else:
                self._port = LocalPort(self.pool, self.show)
        return self._port

    @property
    def driver(self) -> Driver:
        """The object that runs this process's marked items."""
        if self._driver is None:
            from pytest_accel.driver.driver import Driver

            self._driver = Driver(self.config, self.settings, self.port, self.session_kind)
        return self._driver

    @property
    def session_kind(self) -> str | None:
        """The kind of the session's devices; None if it has none."""
        inventory = self.machine.session
        return inventory.kind if inventory.devices else None

    def redirect(self, items: Sequence[pytest.Item]) -> list[MarkedItem]:
        """Make all marked `items` run in worlds; return those that were not redirected before.

        If a mark is wrong, raise :class:`pytest.UsageError`; in an xdist worker, have the controller raise it.
        """
        finder, redirected = MarkFinder(), []
        errors: dict[pytest.Item, str] = {}
        for item in items:
            existing = item.stash.get(MARKED, None)
            if existing is not None:
                if existing.item is item:
                    continue
                item.stash = pytest.Stash()  # A copied item, as pytest-flakefinder makes, shares the original's stash.
            marks = finder.find(item)
            if marks.devices is None and marks.distributed is None:
                continue
            from pytest_accel.hardware.registry import VendorError
            from pytest_accel.mark_arguments import MarkError

            try:
                redirected.append(self._redirect(item, marks))
            except (MarkError, VendorError) as error:
                errors[item] = f"{item.nodeid}: {error}"
        if redirected and self.is_worker and self.config.option.trace:
            text = "--trace has no terminal where xdist distributes the tests: run them without -n"
            errors |= {marked.item: text for marked in redirected}
        if errors:
            self.refuse("\n".join(dict.fromkeys(errors.values())), errors)
        if redirected:
            _leave_collectors_to_ranks(items)
        return redirected

    def refuse(self, text: str, items: Iterable[pytest.Item]) -> None:
        """End the session with the usage error `text`, which describes what is wrong with `items`.

        Make `items` fail as well, because the controller ignores a usage error that a worker sends after its list of
        tests.
        """
        for item in items:
            item.setup = partial(_fail_setup, text)  # type: ignore[method-assign]
        self.port.usage_error(text)

    def _redirect(self, item: pytest.Item, marks: Marks) -> MarkedItem:
        """Make `item` run in a world. Raise `MarkError` or `VendorError` if `marks` are wrong."""
        from pytest_accel.core.world_key import key_for
        from pytest_accel.driver.items import MarkedItem
        from pytest_accel.mark_arguments import requirement as parse_marks

        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec is not None else {}
        size = params.get(WORLD_SIZE_PARAMETER, params.get("world_size"))
        requirement = parse_marks(marks, size)
        assert requirement is not None
        if requirement.devices is not None and planned_machine(self.config) is not None:
            from pytest_accel.hardware.hypothetical_machine import without_figures

            requirement = replace(requirement, devices=without_figures(requirement.devices))
        key = key_for(requirement, self.session_kind, self._traits, fresh=self.settings.fresh or _is_forked(item))
        if self.outer is not None and self.settings.spread and not key.grouped:
            # Use only servers on this node, because the devices are leased here.
            near = self.outer.layout.near
            key = replace(key, server=near[next(self._server_turns) % len(near)])
        marked = MarkedItem(item, requirement, key, self._missing(key), self.driver)
        marked.install()
        item.stash[MARKED] = marked
        return marked

    def _missing(self, key: WorldKey) -> str | None:
        """Return why this machine, or the launched processes, can never run a world of `key`; None if they can."""
        from pytest_accel.hardware.matching import shortfall
        from pytest_accel.nodes.placement import HERE

        layout, launcher = HERE, None
        if self.outer is not None:
            layout, launcher = self.outer.layout, self.outer.world.launcher
        shortage = layout.shortage(key.ranks, key.nodes, launcher) if key.grouped else None
        if shortage is None and key.launcher is not None:
            shortage = self._launcher_missing(key.launcher)
        if shortage is not None or key.need is None:
            return shortage
        nodes = [seat.node for seat in layout.seats(key.ranks, key.nodes)] if key.grouped and self.outer else [0]
        if len(layout.nodes) > 1 and any(nodes):
            return self._missing_on_several(key, nodes)
        missing = shortfall(key.need, self._inventory(key.kind))
        if missing is not None and key.grouped and key.need.share is not None and key.need.sets == 1:
            missing += "; ranks share a device under backend='gloo' only"
        return missing

    def _launcher_missing(self, launcher: str) -> str | None:
        """Return why `launcher` cannot start the ranks of a test; None if it can."""
        from pytest_accel.launch.launch_api import missing

        if self.outer is not None:
            return f"its ranks are started by {launcher}, which a session under {self.outer.world.launcher} does not do"
        return missing(launcher)

    def _inventory(self, kind: str) -> Inventory:
        return self.machine.session if kind == "none" else self.machine.of(kind)

    def _missing_on_several(self, key: WorldKey, nodes: Sequence[int]) -> str | None:
        """Return why the devices of several nodes do not suffice for `key`; `nodes` has the node of each rank."""
        from pytest_accel.hardware.matching import shortfall
        from pytest_accel.nodes.remote_leases import FarSupplyError

        assert self.outer is not None
        if 0 not in nodes:
            return f"needs {key.ranks} ranks with devices; rank 0's node has too few ranks to be among theirs"
        for node, need in key.needs(nodes).items():
            try:
                remote = self.outer.supplies[node].inventory(key.kind, self.settings) if node else None
            except FarSupplyError as error:
                return str(error)
            missing = shortfall(need, self._inventory(key.kind) if remote is None else remote)
            if missing is not None:
                return f"{missing} (on {self.outer.layout.nodes[node].name})"
        return None

    def _traits(self, kind: str) -> Traits:
        from pytest_accel.core.device import Share
        from pytest_accel.core.world_key import Traits

        if kind == "none":
            return Traits()
        vendor = self.machine.vendor(kind)
        count = self.settings.share
        return Traits(vendor.backend, vendor.ranks, None if count is None else Share(fraction=1 / count))

    def close(self, *, politely: bool) -> None:
        """Return this process's world to the pool; in the controller, close the pool and its processes.

        With `politely`, session fixtures in the ranks are torn down first.
        """
        if self.is_forked_copy:
            return  # The world and the pool belong to the original process.
        if self._driver is not None:
            self._driver.close()
        try:
            if self._pool is not None:
                self._pool.close(politely=politely)
        finally:
            if self._coverage is not None:
                for problem in self._coverage.combine():
                    self.show(f"accel: coverage of ranks is incomplete: {problem}")

    def show(self, line: str) -> None:
        """Write a line to the terminal of the controller; any thread may call this method."""
        from pytest_accel.core.terminal_lines import write_line

        with contextlib.suppress(OSError, ValueError):  # A closed terminal must not keep the worlds from running.
            write_line(self.config, line)

    def withdraw_waiting(self) -> list[str]:
        """Cancel all requests that wait for devices or slots; return a line to show for each."""
        if self._pool is None or self.is_forked_copy:
            return []
        from pytest_accel.pool.pool_client import waiting_line

        return [waiting_line(waiting) for waiting in self._pool.withdraw_waiting()]

    def look_at_interrupted(self) -> None:
        """In the controller, record where the ranks of all running tests are."""
        if self._pool is not None and not self.is_forked_copy:
            self._pool.look_at_interrupted()

    @property
    def interrupted(self) -> list[Interrupted]:
        """The tests that ran when the session was interrupted."""
        return self._pool.interrupted if self._pool is not None else []

    @property
    def complaints(self) -> list[str]:
        """Errors that belong to no test, such as one in the teardown of a session fixture."""
        return self._pool.complaints if self._pool is not None else []

    @property
    def notes(self) -> list[str]:
        """Lines on the fork server that ``-v`` shows."""
        return self._pool.notes if self._pool is not None else []


def _is_forked(item: pytest.Item) -> bool:
    """Return whether pytest-forked would run `item` in a forked child process."""
    config = item.config
    if not config.pluginmanager.has_plugin("pytest_forked"):
        return False
    return bool(config.getoption("forked")) or item.get_closest_marker("forked") is not None


def _leave_collectors_to_ranks(items: Sequence[pytest.Item]) -> None:
    """Skip the setup of collectors whose tests all run in ranks.

    For example, a package's ``setup_module`` runs in this process only if one of the package's tests does.
    """
    needed = {node for item in items if MARKED not in item.stash for node in item.listchain()}
    for item in items:
        for node in item.listchain()[:-1]:
            if node not in needed:
                node.setup = _do_nothing  # type: ignore[method-assign]


def _do_nothing() -> None:
    pass


def _fail_setup(text: str) -> None:
    """Raise an error with `text` in place of the setup of a test."""
    from pytest_accel.verdict import remote_exceptions

    __tracebackhide__ = True
    raise remote_exceptions.not_run(text)


def _on_wanted(driver: object, world: int) -> None:
    """Tell the driver that another request waits for the devices or slots of its `world`."""
    from pytest_accel.pool.pool_client import LocalPort, PoolService

    assert isinstance(driver, (LocalPort, PoolService))
    driver.on_wanted(world)


def _explanation_options(config: pytest.Config) -> list[str]:
    """Return the options that make a rank, which has no terminal, explain assertions as this process would."""
    options = []
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    # No colours under xdist, whose workers use none either.
    if getattr(reporter, "hasmarkup", False) and not is_distributed(config):
        options.append("--color=yes")
    # pytest-icdiff reads the width of the terminal when it is imported.
    columns = getattr(sys.modules.get("pytest_icdiff"), "AUTO_COLS", None)
    if columns is not None and getattr(config.option, "icdiff_cols", "") is None:
        options.append(f"--icdiff-cols={columns}")
    return options


def _session_spec(config: pytest.Config, settings: Settings, machine: Machine) -> SessionSpec:
    """Return what all ranks must know of this session, without the settings of coverage."""
    from pytest_accel.core.paths import private_directory
    from pytest_accel.core.plugin_roles import chosen_roles
    from pytest_accel.core.session_spec import SessionSpec, with_options
    from pytest_accel.core.shims import base_temporary_directory

    option = config.option
    args = [str(argument) for argument in config.invocation_params.args]
    if OUTER in config.stash:
        args = without_local_rank(args)
    options = []
    for plugin in config.invocation_params.plugins or ():
        # PyCharm passes its plugin to `pytest.main`. Ranks load it, too, since the command line may have its options.
        if isinstance(plugin, ModuleType) and plugin.__spec__ is not None:
            options += ["-p", plugin.__spec__.name]
    uncaptured = getattr(option, "capture", None) == "no"
    distributed = is_distributed(config)
    streams = uncaptured and not distributed  # A worker of xdist has no terminal.
    if settings.logs is not None and not streams:
        options.append("--capture=tee-sys")  # Captured output is in the log, too, even if the rank dies.
    elif uncaptured and not streams:
        options.append("--capture=fd")
    if hasattr(option, "no_cov"):
        options.append("--no-cov")
    if isinstance(seed := getattr(option, "randomly_seed", None), int):
        options.append(f"--randomly-seed={seed}")
    options += _explanation_options(config)
    directory = private_directory()
    basetemp = base_temporary_directory(config)
    return SessionSpec(
        args=with_options(args, options),
        invocation_dir=str(config.invocation_params.dir),
        sys_path=tuple(sys.path),
        directory=directory,
        basetemp=str(basetemp / "accel") if basetemp is not None else os.path.join(directory, "tmp"),
        preload=tuple(name for name in settings.preload if name != "auto"),
        plugins=installed_plugins(config.option.plugins, config.rootpath),
        roles=tuple(chosen_roles(config.pluginmanager, settings.rank_plugins).items()),
        markers=tuple(config.getini("markers")),
        hidden=tuple(machine.vendor(machine.session.kind).mask((), os.environ).items())
        if machine.session.present
        else (),
        distributed=distributed,
        debug=settings.debug,
        leaks=settings.leaks,
        kept_processes=settings.keep_processes,
        logs=os.path.join(config.invocation_params.dir, settings.logs) if settings.logs is not None else None,
        streams=streams,
    )
