"""Leak check: after each test, find what the test left behind in its rank, undo it if possible, and report it.

The check ignores what fixtures of a wider scope than a test create or change: they clean up later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from functools import partial
from gc import collect
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_accel.rank import (
    device_memory,
    group_state,
    leaked_groups,
    leaked_processes,
    process_state,
    rpc,
    torch_devices,
)
from pytest_accel.rank.leaked_groups import LeakedGroups, find_leaked

if TYPE_CHECKING:
    from pytest_accel.rank.context import RankContext

_MEMORY_TOLERANCE = 64 << 20
"""Bytes by which torch's allocated memory on a device may grow in a test without being a leak.

A test may leave constants and small caches of libraries behind. Their workspaces can be larger
(https://docs.nvidia.com/cuda/cublas/#cublassetworkspace): they are cleared before a test is said to leak memory. They
are not cleared at the beginning of a test, which would cost every test something: up to this number of bytes, those of
earlier tests may hide a leak.
"""
_REPLACED = "its processes have been replaced"


class Leaks(NamedTuple):
    """The leaks of one test in one rank."""

    lines: tuple[str, ...] = ()
    """The text for the report, one line for each leak."""
    kill_reason: str | None = None
    """Why this process must be killed after the test; None: no reason."""
    retire: bool = False
    """True if the process should not run another test, although the test did nothing wrong."""


def check_failed(error: Exception) -> Leaks:
    """Return the result of a check that failed with `error`."""
    what = f"{type(error).__name__}: {error}"
    cause = f"could not be checked for leftovers ({what}): it may have replaced a function that its process needs"
    return Leaks((f"{cause}; {_REPLACED}",), f"the test {cause}")


class LeakCheck:
    """Pytest plugin that checks for leaks in one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._counts_memory = context.session.leaks != "off"
        self._settings: process_state.Settings = {}
        """Settings at the beginning of the test."""
        self._ended_clean = False
        """True if the last test has ended without a leak or a changed setting."""
        self._activity = 0
        self._wider_settings: dict[object, set[tuple[str | bytes, object]]] = {}
        """Settings before and after the setup of each fixture of a wider scope that is set up and may restore them."""
        self._restored_settings: set[tuple[str | bytes, object]] = set()
        """The same of the fixtures that have been torn down since the beginning of the test."""
        self._known = leaked_processes.find()
        """Processes and threads that the test has not started."""
        self._rpc = 0
        """Count of RPC initialisations at the beginning of the test, or after a wider fixture has initialised RPC."""
        self._memory: dict[str, int] = {}
        """Bytes allocated on each device at the beginning of the test."""
        self._kept_memory: dict[str, int] = {}
        """Bytes allocated on each device by wider fixtures during the test."""
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
        self._memory = self._allocated()
        self._kept_memory = {}
        self._known |= leaked_processes.find()
        self._rpc = rpc.initialisations()
        if self._context.spec.grouped:
            self._context.operations.begin()
            self._context.store_keys.begin()
            self._groups = group_state.created_count()
        unchanged = self._ended_clean and activity == self._activity
        self._ended_clean, self._activity = False, activity
        self._restored_settings = set()
        if unchanged:
            return  # The last check found the same settings. Reading them again takes longer than many tests.
        if self._context.spec.grouped:
            leaked_groups.destroy(self._context)
        self._settings = process_state.read(self._context.variables)

    @pytest.hookimpl(trylast=True)
    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Exempt a collector's own `setup` as if it were a wider fixture: it may start the kernel of a notebook."""
        if type(collector).setup is pytest.Collector.setup or "setup" in vars(collector):
            return
        setup = collector.setup

        def exempt_setup() -> None:
            __tracebackhide__ = True
            collector.addfinalizer(partial(self._keep_until_next_test, collector))
            with self._wider_fixture(collector):
                setup()

        vars(collector)["setup"] = exempt_setup

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Exempt fixtures of a wider scope than one test."""
        __tracebackhide__ = True
        if fixturedef.scope == "function":
            return (yield)
        with self._wider_fixture(fixturedef):
            return (yield)

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        self._keep_until_next_test(fixturedef)

    def _keep_until_next_test(self, owner: object) -> None:
        """Exempt the settings of a fixture or collector that is torn down until the next test begins."""
        self._restored_settings |= self._wider_settings.pop(owner, set())

    @contextlib.contextmanager
    def _wider_fixture(self, owner: object) -> Iterator[None]:
        """Attribute changes made in the ``with`` block to `owner`, a fixture of a wider scope, not to the test."""
        grouped = self._context.spec.grouped
        settings = process_state.read(self._context.variables)
        spawned = leaked_processes.find()
        memory = self._allocated()
        groups = group_state.group_names() if grouped else set()
        initialised = rpc.initialisations()
        own_groups, created = self._groups, group_state.created_count() if grouped else 0
        try:
            with self._context.operations.wider_fixture(), self._context.store_keys.wider_fixture():
                yield
        finally:
            changed = process_state.changed(settings, process_state.read(self._context.variables))
            pairs = {(name, value) for name, values in changed.items() for value in values}
            self._wider_settings.setdefault(owner, set()).update(pairs)
            self._known |= leaked_processes.find() - spawned
            for device, size in self._allocated().items():
                self._kept_memory[device] = self._kept_memory.get(device, 0) + max(0, size - memory.get(device, 0))
            if (now := rpc.initialisations()) != initialised:
                self._rpc = now
            if grouped:
                self._context.kept_groups |= group_state.group_names() - groups
                self._groups = own_groups + group_state.created_count() - created

    def end(self, *, closed_streams: bool, failed_work: torch_devices.FailedWork | None) -> Leaks:
        """Return the leaks of the test since :meth:`begin`, after undoing those that can be undone.

        `closed_streams` is True if the test has closed pytest's capture streams. `failed_work` is work on a device that
        has failed, after which the device is unusable for this process.
        """
        lines: list[str] = []
        lasting: list[str] = []  # Leaks that cannot be undone.
        settings = process_state.read(self._context.variables)
        exempt = self._restored_settings.union(*self._wider_settings.values())
        if closed_streams:
            lasting.append("closed its standard streams, which are pytest's own files")
        for name, (old, new) in process_state.changed(self._settings, settings).items():
            if (name, new) in exempt:
                continue
            change = f"left {process_state.describe_change(name, old, new)}"
            if process_state.restore(name, old):
                lines.append(f"{change}; it has been put back")
            else:
                lasting.append(change)
        killed, running = leaked_processes.kill_new(self._known, self._context.session.kept_processes)
        lines += killed
        lasting += running
        initialised = rpc.initialisations()
        runs = initialised > 0 and rpc.is_running()
        if runs and initialised != self._rpc:
            lasting.append("left torch.distributed.rpc running")
        if failed_work is not None:
            # The test has seen the error, or has failed because of it, so the error needs no line.
            return Leaks((*lines, *_with_replacement(lasting)), f"the test left a device unusable: {failed_work}")
        lasting += self._grown_memory()
        groups = find_leaked(self._context) if self._context.spec.grouped else LeakedGroups()
        lines += groups.lines
        self._ended_clean = settings == self._settings and not (lines or lasting or groups.destroyable)
        lines += _with_replacement(lasting)
        kill_reason = f"the test {lasting[0]}" if lasting else groups.kill_reason
        return Leaks(tuple(lines), kill_reason, retire=self._context.store_keys.end() or (initialised > 0 and not runs))

    def _allocated(self) -> dict[str, int]:
        return torch_devices.allocated_memory(self._context) if self._counts_memory else {}

    def _grown_memory(self) -> list[str]:
        """Return a line for each device on which the test has left more memory allocated than is tolerated."""
        grown = self._growth()
        # Tensors in reference cycles are no leak either: the garbage collector would free them later.
        for release in (device_memory.clear_workspaces, collect):
            if any(size > _MEMORY_TOLERANCE for size in grown.values()):
                release()
                grown = self._growth()
        return [
            f"left {size / (1 << 20):.0f} MiB more allocated on {device} than it had found"
            for device, size in grown.items()
            if size > _MEMORY_TOLERANCE
        ]

    def _growth(self) -> dict[str, int]:
        """Return the bytes by which the memory of each device has grown because of the test."""
        return {
            device: size - self._memory.get(device, 0) - self._kept_memory.get(device, 0)
            for device, size in self._allocated().items()
        }


def _with_replacement(lasting: list[str]) -> list[str]:
    """Return the lines for the report about leaks that cannot be undone."""
    return [f"{leak}; {_REPLACED}" for leak in lasting]
