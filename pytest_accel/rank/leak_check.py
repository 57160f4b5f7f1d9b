"""Leak check: after each test, find what the test left behind in its rank, and report it.

Nothing that the suite may still use is ended: processes, threads and process groups stay as long as the rank. The rank
is replaced if a leak would make later tests wrong. Only settings are put back.

The check ignores what fixtures of a wider scope than a test create or change: they clean up later. What a test starts
while such a fixture, which it uses, is set up may belong to the fixture, so it is judged when the fixture has been torn
down. What a global of the test's module keeps is judged when the module has been torn down. What a global of another
module keeps belongs to that module, which lives as long as the rank.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec import structs

from pytest_accel.core import torch_api
from pytest_accel.core.rank_messages import Leak, LeakKind
from pytest_accel.rank import group_state, process_state
from pytest_accel.rank.device_memory import MemoryGrowth
from pytest_accel.rank.holders import StartedThings

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext
    from pytest_accel.rank.torch_devices import FailedWork


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
        self._wider_settings: dict[object, set[tuple[str | bytes, object]]] = {}
        """Settings before and after the setup of each fixture of a wider scope that is set up and may restore them."""
        self._restored_settings: set[tuple[str | bytes, object]] = set()
        """The same of the fixtures that have been torn down since the beginning of the test."""
        self._started = StartedThings(context)
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

    def begin(self) -> None:
        """Record the state before a test."""
        if self._memory is not None:
            self._memory.begin()
        self._started.begin()
        self._rpc = torch_api.rpc_initialisations()
        if self._context.spec.grouped:
            self._context.operations.begin()
            self._context.store_keys.begin()
            self._context.kept_groups = group_state.group_names()
            self._groups = group_state.created_count()
        self._restored_settings = set()
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
            self._started.add_collector(collector)
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
        self._started.add_fixture(fixturedef, value)
        return value

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._end_owner(fixturedef)

    def _end_owner(self, owner: object) -> None:
        """Record that a fixture or collector is torn down. Exempt its settings until the next test begins."""
        self._started.remove(owner)
        self._restored_settings |= self._wider_settings.pop(owner, set())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._started.begin_teardown(item)

    def _read_settings(self) -> process_state.Settings:
        return process_state.read(self._context.variables) if self._is_on else {}

    @contextmanager
    def _wider_fixture(self, owner: pytest.FixtureDef[Any] | pytest.Collector) -> Iterator[None]:
        """Attribute changes made in the ``with`` block to `owner`, a fixture of a wider scope, not to the test."""
        grouped = self._context.spec.grouped
        settings = self._read_settings()
        initialised = torch_api.rpc_initialisations()
        own_groups, created = self._groups, group_state.created_count() if grouped else 0
        try:
            with ExitStack() as stack:
                stack.enter_context(self._started.wider_fixture())
                stack.enter_context(self._context.operations.wider_fixture())
                stack.enter_context(self._context.store_keys.wider_fixture())
                if self._memory is not None:
                    stack.enter_context(self._memory.wider_fixture(owner.addfinalizer))
                yield
        finally:
            changed = process_state.changed(settings, self._read_settings())
            pairs = {(name, value) for name, values in changed.items() for value in values}
            self._wider_settings.setdefault(owner, set()).update(pairs)
            if (now := torch_api.rpc_initialisations()) != initialised:
                self._rpc = now
            if grouped:
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
        found += self._started.judge()
        initialised = torch_api.rpc_initialisations()
        runs = initialised > 0 and torch_api.rpc_is_running()
        if runs and initialised != self._rpc:
            found.append(Leak(LeakKind.RPC, lasting=True))
        if failed_work is not None:
            # The test has seen the error, or has failed because of it, so the error is no leak.
            return Leaks(_lasting_last(found), str(failed_work))
        found += self._memory.leaks() if self._memory is not None else ()
        return Leaks(
            _lasting_last(found),
            lost_default=self._context.spec.grouped and self._has_lost_default(),
            retire=self._context.store_keys.end() or (initialised > 0 and not runs) or self._started.too_many_groups,
        )

    def _has_lost_default(self) -> bool:
        """Return whether the default process group of the world has been destroyed or replaced."""
        return self._context.default_group is not None and not group_state.has_own_default(self._context)


def _lasting_last(leaks: list[Leak]) -> tuple[Leak, ...]:
    """Return `leaks` with those last for which the ranks are replaced."""
    return tuple(sorted(leaks, key=lambda leak: leak.lasting))
