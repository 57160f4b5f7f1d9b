"""Calls of the kernel: the leases that tests need, and the fixture `accel_resources`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.device import Device
from pytest_accel.core.marks import NEEDS, MarkError
from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED, missing_leases

if TYPE_CHECKING:
    from pytest_accel.core.world_key import DriverLeases
    from pytest_accel.messages.world_spec import WorldSpec
    from pytest_accel.session import AccelSession

_PLUGIN = "accel-resources"
"""Name of the plugin with the hooks."""


def pytest_accel_configure(session: AccelSession) -> None:
    session.config.addinivalue_line(
        "markers",
        "needs(*names, **counts): lease these resources of accel_resources while the test runs, as in "
        'needs("license") or needs(license=2, cores=4, memory="8GiB"); needs({"port-9000": 1}) for names that are no '
        "identifiers.",
    )
    session.config.pluginmanager.register(_LeaseHooks(session), _PLUGIN)


def pytest_accel_configure_rank(config: pytest.Config) -> None:
    config.pluginmanager.register(_Fixture(), _PLUGIN)


def pytest_accel_read_needs(session: AccelSession, items: Sequence[pytest.Item]) -> dict[pytest.Item, str]:
    """Store the leases of each test with the mark; return an error for each test whose marks are wrong."""
    errors: dict[pytest.Item, str] = {}
    for item in items:
        if DRIVER_LEASES not in item.stash and (marks := tuple(item.iter_markers(NEEDS))):
            from pytest_accel.features.resources.needs_mark import leases

            try:
                item.stash[DRIVER_LEASES] = leases(marks, session.machine)
            except MarkError as error:
                errors[item] = str(error)
    return errors


class _Fixture:
    """The fixture, which has no value in ranks."""

    devices: tuple[Device, ...] | None = None
    """The devices that the running test has leased; None in a rank."""

    @pytest.fixture
    def accel_resources(self) -> dict[str, tuple[int, ...]]:
        """Return which of the named resources the test has: ``{"license": (1,)}``."""
        if self.devices is None:
            pytest.fail(
                "the fixture 'accel_resources' has a value only in tests without the marks devices and distributed: "
                "the process that reports this test holds what it needs",
                pytrace=False,
            )
        numbers: dict[str, tuple[int, ...]] = {}
        for device in self.devices:
            numbers[device.kind] = (*numbers.get(device.kind, ()), device.index)
        return numbers


class _LeaseHooks(_Fixture):
    """Leases what a test needs before its phases, and returns it after them. Registered in drivers and controllers.

    No limit of the test's time includes the wait, and reruns of a test (pytest-rerunfailures) use the same leases.
    """

    devices: tuple[Device, ...] = ()

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._error: BaseException | None = None
        """The reason why the running test has no leases, as its setup raises it."""

    def pytest_report_header(self) -> str:
        from pytest_accel.core.units import format_memory

        named = self._session.settings.resources
        shown = (f"{name} {format_memory(count) if name == 'memory' else count}" for name, count in named)
        return f"accel: resources of tests: {', '.join(shown)}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        """Register these hooks after all other plugins' hooks: they must get the leases before others begin a test."""
        plugins = self._session.config.pluginmanager
        plugins.unregister(self)
        plugins.register(self, _PLUGIN)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        leases = item.stash.get(DRIVER_LEASES, None)
        only_shows = getattr(item.config.option, "setupplan", False)
        if leases is None or only_shows or any(item.iter_markers("skip")):
            return (yield)
        if self._session.is_forked_copy:
            text = "a process that a test forked has returned from the test; only the original process gets resources"
            pytest.exit(text, returncode=1)
        held: list[WorldSpec] = []
        try:
            try:
                self._acquire(item, leases, held)
            except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                self._error = error
            return (yield)
        finally:
            self._error, self.devices = None, ()
            for spec in held:
                self._session.end_lease(spec)

    def _acquire(self, item: pytest.Item, leases: DriverLeases, held: list[WorldSpec]) -> None:
        """Wait for the leases, one after the other, and add them to `held`. Raise what the setup raises."""
        from pytest_accel import unmarked_tests
        from pytest_accel.verdict import phase_verdict

        unmarked_tests.fail_expected(item.config)
        if leases.missing is None:
            for key in leases.keys:
                held.append(self._session.lease(key, item.nodeid))
                self.devices += held[-1].devices
        elif MARKED not in item.stash:  # For an item with marks of the kernel, the kernel reports it.
            if self._session.settings.strict:
                raise phase_verdict.not_run(f"{leases.missing} (--accel-strict)")
            pytest.skip(leases.missing)

    @pytest.hookimpl
    def pytest_runtest_setup(self) -> None:
        __tracebackhide__ = True
        if self._error is not None:
            raise self._error

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Check marks before the call, for changes by fixtures and hooks, and after it, for changes by the test."""
        __tracebackhide__ = True
        _check_marks(item)
        result = yield
        _check_marks(item)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        missing = missing_leases(item)
        if missing is not None and call.excinfo is not None and call.excinfo.value is self._error:
            report.accel_missing = missing  # type: ignore[attr-defined]
            if report.skipped:
                path, line, _ = item.location
                report.longrepr = (path, (line or 0) + 1, f"Skipped: {missing}")
        return report


def _check_marks(item: pytest.Item) -> None:
    """Fail a test whose marks have changed since its collection: its leases do not match them."""
    leases = item.stash.get(DRIVER_LEASES, None)
    if tuple(item.iter_markers(NEEDS)) != (() if leases is None else leases.marks):
        from pytest_accel import unmarked_tests
        from pytest_accel.verdict import phase_verdict

        unmarked_tests.fail_expected(item.config)
        raise phase_verdict.not_run(
            "the marks needs of the test were changed after collection; change them in pytest_collection_modifyitems"
        )
