"""Calls of the kernel: the leases that tests need, and the fixture `accel_resources`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.marks import MarkError
from pytest_accel.core.stash_keys import DRIVER_LEASES
from pytest_accel.features.resources import needs_mark
from pytest_accel.features.resources.needs_mark import MARKER_LINE, Supply

if TYPE_CHECKING:
    from pytest_accel.features.resources.lease_hooks import LeaseHooks
    from pytest_accel.session import AccelSession

_MARK = "needs"


def configure(session: AccelSession) -> None:
    session.config.addinivalue_line("markers", MARKER_LINE)
    session.config.pluginmanager.register(_ResourceHooks(session), "accel-resources")


def configure_rank(config: pytest.Config) -> None:
    config.pluginmanager.register(_RankFixture(), "accel-resources")


def read_needs(session: AccelSession, items: Sequence[pytest.Item]) -> bool:
    """Store the leases of each test with the mark. End the session with an error if a mark is wrong."""
    supply: Supply | None = None
    errors: dict[pytest.Item, str] = {}
    for item in items:
        if DRIVER_LEASES in item.stash or not (marks := list(item.iter_markers(_MARK))):
            continue
        supply = supply or _supply(session)
        try:
            item.stash[DRIVER_LEASES] = needs_mark.leases(marks, supply)
        except MarkError as error:
            errors[item] = f"{item.nodeid}: {error}"
    if errors:
        from pytest_accel.item_redirection import Redirector

        Redirector(session).refuse("\n".join(dict.fromkeys(errors.values())), errors)
    return supply is not None


def _supply(session: AccelSession) -> Supply:
    from pytest_accel.settings.machine import memory_part

    machine, resources = session.machine, dict(session.settings.resources)
    counts = {name: machine.slots if name == "cores" else len(machine.of(name).devices) for name in resources}
    return Supply(counts, memory_part(resources.get("memory", 0)))


class _ResourceHooks:
    """The header, the fixture, and the start of the hooks that get leases. Registered in drivers and controllers."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._leases: LeaseHooks | None = None
        """None in a session without tests that need leases."""

    def pytest_report_header(self) -> str:
        from pytest_accel.core.units import format_memory

        named = self._session.settings.resources
        shown = (f"{name} {format_memory(count) if name == 'memory' else count}" for name, count in named)
        return f"accel: resources of tests: {', '.join(shown)}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Register the hooks after those of all other plugins: they must wait before these begin with a test."""
        option = session.config.option
        runs_tests = not any(getattr(option, name, False) for name in ("collectonly", "setupplan"))
        if runs_tests and any(DRIVER_LEASES in item.stash for item in session.items):
            from pytest_accel.features.resources.lease_hooks import LeaseHooks

            self._leases = LeaseHooks(self._session)
            session.config.pluginmanager.register(self._leases, "accel-leases")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Fail a test whose marks have changed since its collection: it does not have what they say."""
        __tracebackhide__ = True
        leases = item.stash.get(DRIVER_LEASES, None)
        if tuple(item.iter_markers(_MARK)) != (() if leases is None else leases.marks):
            from pytest_accel import late_marks
            from pytest_accel.verdict import remote_exceptions

            late_marks.fail_expected(item.config)
            raise remote_exceptions.not_run(
                "the marks needs of the test were changed after collection; "
                "change them in pytest_collection_modifyitems"
            )

    @pytest.fixture
    def accel_resources(self) -> dict[str, tuple[int, ...]]:
        """Return which of the named resources the test has: ``{"license": (1,)}``."""
        numbers: dict[str, tuple[int, ...]] = {}
        for device in () if self._leases is None else self._leases.devices:
            name, _, number = device.rpartition("-")
            if name != "memory":
                numbers[name] = (*numbers.get(name, ()), int(number))
        return numbers


class _RankFixture:
    """The fixture in ranks, where it has no value."""

    @pytest.fixture
    def accel_resources(self) -> None:
        """Fail: only the driver knows."""
        pytest.fail(
            "the fixture 'accel_resources' has a value only in tests without the marks devices and distributed: the "
            "process that reports this test holds what it needs",
            pytrace=False,
        )
