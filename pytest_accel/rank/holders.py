"""What tests have started and not ended, and who may still use it: fixtures, collectors, or the globals of a module.

Runs in ranks only.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from gc import get_objects, get_referents, get_referrers, is_tracked, unfreeze
from pathlib import PurePath
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec import structs

from pytest_accel.core.clock import monotonic
from pytest_accel.core.rank_messages import Leak
from pytest_accel.core.shims import requested_fixtures
from pytest_accel.rank.group_state import group_names
from pytest_accel.rank.leftovers import Spawned, default_group, find, left_groups, left_running

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

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
_REGISTRIES = (
    *("threading", "subprocess", "weakref", "multiprocessing.process", "multiprocessing.util"),
    *("multiprocess.process", "multiprocess.util"),
    *("concurrent.futures.thread", "concurrent.futures.process", "torch.distributed.distributed_c10d"),
)
"""Modules that list all threads, processes or process groups in their globals. They keep none for the suite."""
_OWN = f"{__name__.partition('.')[0]}."
_LONGEST_PATH = 10
"""Number of references between a global and the object, for example `client.pool.workers[0]`."""
_MOST = 100
"""Number of objects whose referrers are looked for at once. The search looks at each object of the process as often."""


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


class StartedThings:
    """The processes, threads and process groups that tests have started in this rank, until each has been judged.

    There is one instance in each rank, which the leak check owns.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._is_on = context.session.leaks != "off"
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

    def _spawned(self) -> Spawned:
        return find() if self._is_on else Spawned()

    def begin(self) -> None:
        """Begin a test."""
        self._known |= self._spawned()
        self._item, self._used = None, ()

    def begin_teardown(self, item: pytest.Item) -> None:
        """Begin the teardown of the test `item`, before any fixture is torn down."""
        self._item = item
        nodes = [node for node in item.listchain() if not _is_of_tool(type(node))]
        self._used = tuple(one for one in (*requested_fixtures(item), *nodes) if one in self._owners)

    def add_collector(self, collector: pytest.Collector) -> None:
        """Record that `collector` is being set up."""
        self._owners[collector] = True

    def add_fixture(self, fixture: pytest.FixtureDef[Any], value: object) -> None:
        """Record that `fixture`, one of a wider scope, has been set up and has `value`."""
        # A fixture without a value keeps things in a global, if at all.
        if value is not None and not _is_of_tool(fixture.func):
            self._owners[fixture] = not isinstance(value, _PLAIN)

    def remove(self, owner: object) -> None:
        """Record that a fixture or collector is torn down."""
        self._owners.pop(owner, None)

    @contextmanager
    def wider_fixture(self) -> Iterator[None]:
        """Attribute what is started in the ``with`` block to a fixture of a wider scope, not to the test."""
        grouped = self._context.spec.grouped
        spawned, groups = self._spawned(), group_names() if grouped else set()
        try:
            yield
        finally:
            self._known |= self._spawned() - spawned
            if grouped:
                made = group_names() - groups
                self._context.kept_groups |= made
                # torch gives the names of destroyed groups to others.
                self._started = [one._replace(groups=one.groups - made) for one in self._started]

    @property
    def too_many_groups(self) -> bool:
        """True if tests have left so many process groups that the rank should not run another test."""
        most = _MOST_GROUPS_OF_FIXTURES if self._used else _MOST_GROUPS
        return self._left_groups + sum(len(one.groups) for one in self._started) > most

    def judge(self) -> Iterator[Leak]:
        """Yield each thing that a test has started and left.

        What may belong to a fixture or module that is still set up stays in `_started`.
        """
        grouped = self._context.spec.grouped
        test = "" if self._item is None else self._item.nodeid
        module = None if self._item is None else self._item.getparent(pytest.Module)
        spawned, names = self._spawned() - self._known, group_names() if grouped else set()
        groups = frozenset(names - self._context.kept_groups)
        self._known |= spawned
        self._context.kept_groups |= names
        if any(spawned):
            self._started.append(_Started(test, module, self._used, spawned))
        if default := groups & default_group():
            self._started.append(_Started(test, module, (), groups=default))  # The next test could not make one.
        if groups := groups - default:
            keepers = [one for one in self._used if self._owners.get(one)]
            self._started.append(_Started(test, module, keepers, groups=groups))
        due: list[_Started] = []
        started, self._started = self._started, []
        for one in started:
            (self._started if any(owner in self._owners for owner in one.owners) else due).append(one)
        spawned = reduce(Spawned.__or__, (one.spawned for one in due), Spawned())
        running = left_running(spawned, self._context.session.kept_processes)
        deadline = monotonic() + _LONGEST_SEARCH
        for one in due:
            found = [leftover for leftover in running if not any(leftover.spawned - one.spawned)]
            found += left_groups(one.groups) if one.groups else []
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


def module_that_holds(objects: Sequence[object]) -> ModuleType | None:
    """Return a module whose globals refer to one of `objects`, possibly through other objects; None if none does.

    Frames do not count: those of the test have ended. Neither do the objects of this package.
    """
    unfreeze()  # The collector does not look at what the fork server has imported.
    modules = {
        id(_globals_of(module)): module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)
    }
    seen = {id(objects)}
    for name in _REGISTRIES:
        if name in sys.modules:
            names = _globals_of(sys.modules[name])
            seen |= {id(names), *map(id, list(names.values()))}
    found = [*objects, *_untracked_containers(objects)]
    for _ in range(_LONGEST_PATH):
        seen |= {id(found), *map(id, found)}
        if not 0 < len(found) <= _MOST:
            return None
        found = [one for one in get_referrers(*found) if id(one) not in seen and not _is_passing(one)]
        for one in found:
            if id(one) in modules:
                return modules[id(one)]
    return None


def _globals_of(module: ModuleType) -> dict[str, Any]:
    """Return the globals of `module`. ``vars`` would import a lazy module."""
    found: dict[str, Any] = vars(ModuleType)["__dict__"].__get__(module)
    return found


def _untracked_containers(objects: Sequence[object]) -> list[object]:
    """Return the dictionaries and tuples that hold one of `objects` and that the collector does not know.

    It knows none that has only objects of types without references, as classes written in C++ are.
    """
    ids = {id(one) for one in objects if not is_tracked(one)}
    if not ids:
        return []
    unknown = {
        id(value): value
        for one in get_objects()
        for value in get_referents(one)
        # `in` would call a comparison that a metaclass of the suite defines.
        if (type(value) is dict or type(value) is tuple) and not is_tracked(value)
    }
    return [one for one in unknown.values() if not ids.isdisjoint(map(id, get_referents(one)))]


def _is_passing(referrer: object) -> bool:
    """Return whether `referrer` is a frame or an object of this package."""
    # A class of the suite may define `__module__` as it likes.
    return type(referrer) is FrameType or str(getattr(type(referrer), "__module__", "")).startswith(_OWN)
