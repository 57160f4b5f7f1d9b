"""Leak check: after each test, find what the test left behind in its rank, and report it.

Nothing that the suite may still use is ended: processes, threads and process groups stay as long as the rank. The rank
is replaced if a leak would make later tests wrong. Only settings are put back.

The check ignores what fixtures of a wider scope than a test create or change: they clean up later. What a test starts
while such a fixture, which it uses, is set up may belong to the fixture, so it is judged when the fixture has been torn
down. What a global of the test's module keeps is judged when the module has been torn down. What a global of another
module keeps belongs to that module, which lives as long as the rank.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec import structs

from pytest_accel.core import torch_api
from pytest_accel.core.clock import monotonic
from pytest_accel.core.rank_messages import Leak, LeakKind
from pytest_accel.core.shims import requested_fixtures
from pytest_accel.rank import (
    group_state,
    leaked_groups,
    leaked_processes,
    process_state,
)
from pytest_accel.rank.device_memory import MemoryGrowth
from pytest_accel.rank.holders import module_that_holds
from pytest_accel.rank.leaked_processes import Spawned

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext
    from pytest_accel.rank.torch_devices import FailedWork

_MOST_GROUPS = 100
"""Number of process groups that tests may leave in a rank. Each has connections to the other ranks.

Tests that make a device mesh leave its groups, because torch has no function to destroy them.
"""
_MOST_GROUPS_OF_FIXTURES = 1000
"""The same number while fixtures that may keep the groups are set up: retiring the ranks would end the fixtures."""
_LONGEST_SEARCH = 1.0
"""Seconds for the search for the modules that hold what has been left, which is part of a teardown.

A search takes a tenth of a second in a large suite. What is left afterwards is not reported: it harms no test.
"""
_PACKAGES_OF_TOOLS = ("_pytest.", "pytest_accel.", "xdist.", "pytest_asyncio.", "anyio.")
"""Packages whose fixtures and collectors keep nothing for a test."""
_PLAIN = (str, bytes, int, float, PurePath)
"""Types of values, such as the address of a server, through which a fixture keeps no process group."""


class Leaks(NamedTuple):
    """The leaks of one test in one rank."""

    found: tuple[Leak, ...] = ()
    device_error: str = ""
    """See `Finished.device_error`."""
    lost_default: bool = False
    """See `Finished.lost_default`."""
    retire: bool = False
    """True if the process should not run another test, although the test did nothing wrong."""

    @property
    def must_be_killed(self) -> bool:
        """True if this process must be killed after the test."""
        return bool(self.device_error) or self.lost_default or any(leak.lasting for leak in self.found)


class _Started(NamedTuple):
    """Processes, threads and groups of one test that have not been judged yet."""

    test: str
    """Node id of the test."""
    module: pytest.Module | None
    owners: Collection[object]
    """Fixtures and collectors that may use it. It is judged when they have been torn down."""
    spawned: Spawned = Spawned()
    groups: frozenset[str] = frozenset()
    """Names of process groups."""


def check_failed(error: Exception) -> Leaks:
    """Return the result of a check that failed with `error`."""
    return Leaks((Leak(LeakKind.UNCHECKED, f"{type(error).__name__}: {error}", lasting=True),))


class LeakCheck:
    """Pytest plugin that checks for leaks in one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._is_on = context.session.leaks != "off"
        self._settings: process_state.Settings = {}
        """Settings at the beginning of the test."""
        self._ended_clean = False
        """True if the last test has ended without a changed setting."""
        self._activity = 0
        self._wider_settings: dict[object, set[tuple[str | bytes, object]]] = {}
        """Settings before and after the setup of each fixture of a wider scope that is set up and may restore them."""
        self._restored_settings: set[tuple[str | bytes, object]] = set()
        """The same of the fixtures that have been torn down since the beginning of the test."""
        self._known = self._spawned()
        """Processes and threads that the test has not started."""
        self._owners: dict[object, bool] = {}
        """Fixtures of a wider scope and collectors that are set up; True if they may keep a process group."""
        self._used: tuple[object, ...] = ()
        """The fixtures and collectors of `_owners` that the test uses."""
        self._item: pytest.Item | None = None
        """The test, if it has reached its teardown."""
        self._started: list[_Started] = []
        """Things that this test and earlier ones have started, and that have not been judged yet."""
        self._left_groups = 0
        """Number of process groups that tests have left in this rank."""
        self._rpc = 0
        """Count of RPC initialisations at the beginning of the test, or after a wider fixture has initialised RPC."""
        self._memory = MemoryGrowth(context) if self._is_on else None
        self._groups = 0
        """Number of process groups created until the test began, and by wider fixtures since then."""

    @property
    def groups_by_test(self) -> int:
        """Number of process groups that the test has created, by torch's counter; 0 without the world's own group."""
        # When the default group is destroyed, torch begins to count again.
        return group_state.created_count() - self._groups if group_state.has_own_default(self._context) else 0

    def begin(self, activity: int) -> None:
        """Record the state before a test.

        `activity` differs from that of the last call if code of the suite has run between the two tests
        (`RankCollector.activity`).
        """
        if self._memory is not None:
            self._memory.begin()
        self._known |= self._spawned()
        self._item, self._used = None, ()
        self._rpc = torch_api.rpc_initialisations()
        if self._context.spec.grouped:
            self._context.operations.begin()
            self._context.store_keys.begin()
            self._context.kept_groups = group_state.group_names()
            self._groups = group_state.created_count()
        unchanged = self._ended_clean and activity == self._activity
        self._ended_clean, self._activity = False, activity
        self._restored_settings = set()
        if unchanged:
            return  # The last check found the same settings. Reading them again takes longer than many tests.
        self._settings = self._read_settings()

    @pytest.hookimpl(trylast=True)
    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Exempt a collector's own `setup` as if it were a wider fixture: it may start the kernel of a notebook.

        Of a module, record only that it is set up.
        """
        exempts = type(collector).setup is not pytest.Collector.setup
        if "setup" in vars(collector) or not (exempts or isinstance(collector, pytest.Module)):
            return
        setup = collector.setup

        def exempt_setup() -> None:
            __tracebackhide__ = True
            collector.addfinalizer(partial(self._end_owner, collector))
            self._owners[collector] = True
            with self._wider_fixture(collector) if exempts else nullcontext():
                setup()

        vars(collector)["setup"] = exempt_setup

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Exempt fixtures of a wider scope than one test."""
        __tracebackhide__ = True
        if fixturedef.scope == "function":
            return (yield)
        with self._wider_fixture(fixturedef):
            value = yield
        # A fixture without a value keeps things in a global, if at all.
        if value is not None and not _is_of_tool(fixturedef.func):
            self._owners[fixturedef] = not isinstance(value, _PLAIN)
        return value

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._end_owner(fixturedef)

    def _end_owner(self, owner: object) -> None:
        """Record that a fixture or collector is torn down. Exempt its settings until the next test begins."""
        self._owners.pop(owner, None)
        self._restored_settings |= self._wider_settings.pop(owner, set())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._item = item
        nodes = [node for node in item.listchain() if not _is_of_tool(type(node))]
        self._used = tuple(one for one in (*requested_fixtures(item), *nodes) if one in self._owners)

    def _spawned(self) -> Spawned:
        return leaked_processes.find() if self._is_on else Spawned()

    def _read_settings(self) -> process_state.Settings:
        return process_state.read(self._context.variables) if self._is_on else {}

    @contextmanager
    def _wider_fixture(self, owner: pytest.FixtureDef[Any] | pytest.Collector) -> Iterator[None]:
        """Attribute changes made in the ``with`` block to `owner`, a fixture of a wider scope, not to the test."""
        grouped = self._context.spec.grouped
        settings = self._read_settings()
        spawned = self._spawned()
        groups = group_state.group_names() if grouped else set()
        initialised = torch_api.rpc_initialisations()
        own_groups, created = self._groups, group_state.created_count() if grouped else 0
        try:
            with ExitStack() as stack:
                stack.enter_context(self._context.operations.wider_fixture())
                stack.enter_context(self._context.store_keys.wider_fixture())
                if self._memory is not None:
                    stack.enter_context(self._memory.wider_fixture(owner.addfinalizer))
                yield
        finally:
            changed = process_state.changed(settings, self._read_settings())
            pairs = {(name, value) for name, values in changed.items() for value in values}
            self._wider_settings.setdefault(owner, set()).update(pairs)
            self._known |= self._spawned() - spawned
            if (now := torch_api.rpc_initialisations()) != initialised:
                self._rpc = now
            if grouped:
                made = group_state.group_names() - groups
                self._context.kept_groups |= made
                # torch gives the names of destroyed groups to others.
                self._started = [one._replace(groups=one.groups - made) for one in self._started]
                self._groups = own_groups + group_state.created_count() - created

    def end(self, *, closed_streams: bool, failed_work: FailedWork | None) -> Leaks:
        """Return the leaks of the test since :meth:`begin`, after settings have been put back.

        `closed_streams` is True if the test has closed pytest's capture streams. `failed_work` is work on a device that
        has failed, after which the device is unusable for this process.
        """
        found: list[Leak] = []
        settings = self._read_settings()
        exempt = self._restored_settings.union(*self._wider_settings.values())
        if closed_streams:
            found.append(Leak(LeakKind.STREAMS, lasting=True))
        for name, (old, new) in process_state.changed(self._settings, settings).items():
            if (name, new) not in exempt:
                change = process_state.change(name, old, new)
                found.append(structs.replace(change, lasting=not process_state.restore(name, old)))
        found += self._judge_started()
        initialised = torch_api.rpc_initialisations()
        runs = initialised > 0 and torch_api.rpc_is_running()
        if runs and initialised != self._rpc:
            found.append(Leak(LeakKind.RPC, lasting=True))
        if failed_work is not None:
            # The test has seen the error, or has failed because of it, so the error is no leak.
            return Leaks(_lasting_last(found), str(failed_work))
        found += self._memory.leaks() if self._memory is not None else ()
        self._ended_clean = settings == self._settings
        most_groups = _MOST_GROUPS_OF_FIXTURES if self._used else _MOST_GROUPS
        return Leaks(
            _lasting_last(found),
            lost_default=self._context.spec.grouped and leaked_groups.has_lost_default(self._context),
            retire=self._context.store_keys.end()
            or (initialised > 0 and not runs)
            or self._left_groups + sum(len(one.groups) for one in self._started) > most_groups,
        )

    def _judge_started(self) -> Iterator[Leak]:
        """Yield each thing that a test has started and left.

        What may belong to a fixture or module that is still set up stays in `_started`.
        """
        grouped = self._context.spec.grouped
        test = "" if self._item is None else self._item.nodeid
        module = None if self._item is None else self._item.getparent(pytest.Module)
        spawned, names = self._spawned() - self._known, group_state.group_names() if grouped else set()
        groups = frozenset(names - self._context.kept_groups)
        self._known |= spawned
        self._context.kept_groups |= names
        if any(spawned):
            self._started.append(_Started(test, module, self._used, spawned))
        if default := groups & leaked_groups.default_name():
            self._started.append(_Started(test, module, (), groups=default))  # The next test could not make one.
        if groups := groups - default:
            keepers = [one for one in self._used if self._owners.get(one)]
            self._started.append(_Started(test, module, keepers, groups=groups))
        due: list[_Started] = []
        started, self._started = self._started, []
        for one in started:
            (self._started if any(owner in self._owners for owner in one.owners) else due).append(one)
        spawned = reduce(Spawned.__or__, (one.spawned for one in due), Spawned())
        running = leaked_processes.left(spawned, self._context.session.kept_processes)
        deadline = monotonic() + _LONGEST_SEARCH
        for one in due:
            found = [leftover for leftover in running if not any(leftover.spawned - one.spawned)]
            found += leaked_groups.left(one.groups) if one.groups else []
            self._left_groups += len(one.groups)
            for leftover in found:
                if not leftover.leak.lasting and (not self._is_on or monotonic() > deadline):
                    continue
                holder = None if leftover.leak.lasting else module_that_holds(leftover.handles)
                if holder is not None and holder is not getattr(one.module, "obj", None):
                    self._left_groups -= len(leftover.groups)
                elif holder is not None and one.module in self._owners:
                    self._left_groups -= len(leftover.groups)
                    self._started.append(
                        _Started(one.test, one.module, [one.module], leftover.spawned, leftover.groups)
                    )
                else:
                    yield leftover.leak if one.test == test else structs.replace(leftover.leak, test=one.test)


def _is_of_tool(made: Any) -> bool:
    """Return whether the function or class `made` is one of pytest, its workers or this package."""
    return str(getattr(made, "__module__", "")).startswith(_PACKAGES_OF_TOOLS)


def _lasting_last(leaks: list[Leak]) -> tuple[Leak, ...]:
    """Return `leaks` with those last for which the ranks are replaced."""
    return tuple(sorted(leaks, key=lambda leak: leak.lasting))
