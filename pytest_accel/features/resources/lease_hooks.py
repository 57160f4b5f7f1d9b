"""Hooks that lease what a test needs before its phases, and return it after them, in the process that reports the test.

No limit of the test's time includes the wait, and reruns of a test (pytest-rerunfailures) use the same leases.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.stash_keys import DRIVER_LEASES, missing_leases
from pytest_accel.core.world_key import WorldKey
from pytest_accel.driver.items import marked_of
from pytest_accel.leases.demand import WorldDemand
from pytest_accel.leases.holder import Holder
from pytest_accel.pool.pool_messages import LeaseGrant, PoolError
from pytest_accel.verdict import remote_exceptions

if TYPE_CHECKING:
    from pytest_accel.session import AccelSession


class LeaseHooks:
    """Owns the leases of the running test. Registered last, so that its wrappers are around those of other plugins."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._error: BaseException | None = None
        """The error that has prevented the leases of the test."""
        self._is_missing = False
        """True if this object has skipped or failed the test, since the session lacks what it needs."""
        self.devices: tuple[str, ...] = ()
        """The ids of the devices that the running test has, for the fixture."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        needed, marked = item.stash.get(DRIVER_LEASES, None), marked_of(item)
        leases = () if needed is None else needed.beside(None if marked is None else marked.key)
        if not leases or any(item.iter_markers("skip")):
            return (yield)
        if self._session.is_forked_copy:
            text = "a process that a test forked has returned from the test; only the original process gets resources"
            pytest.exit(text, returncode=1)
        held: list[LeaseGrant] = []
        try:
            try:
                self._acquire(item, leases, held)
            except Exception as error:  # Raised in the setup phase, where pytest reports it as an error of this test.
                self._error = remote_exceptions.not_run(str(error)) if isinstance(error, PoolError) else error
            return (yield)
        finally:
            self._error, self.devices = None, ()
            if not self._session.is_forked_copy:  # A child that the test has forked holds nothing.
                for grant in held:
                    self._session.pool_client.release_lease(grant.lease)

    def _acquire(self, item: pytest.Item, leases: Iterable[tuple[WorldKey, str]], held: list[LeaseGrant]) -> None:
        """Wait for the `leases`, one after the other, and add them to `held`."""
        # Without this, two drivers could wait for each other: one has a world and waits for a lease, the other has the
        # lease and waits for the devices of the world.
        self._session.give_back_world()
        for key, text in leases:
            demand = WorldDemand(key, Holder.here(item.nodeid), text)
            # Only this session uses the CPU slots, so the wait for them has no limit.
            timeout = None if key.need is None else self._session.settings.wait
            grant = self._session.pool_client.acquire(demand, timeout)
            assert isinstance(grant, LeaseGrant)
            held.append(grant)
        self.devices = tuple(device for grant in held for device in grant.devices)

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        __tracebackhide__ = True
        if self._error is not None:
            raise self._error
        missing = missing_leases(item) if marked_of(item) is None else None
        self._is_missing = missing is not None
        if missing is not None:
            if self._session.settings.strict:
                raise remote_exceptions.not_run(f"{missing} (--accel-strict)")
            pytest.skip(missing)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when != "setup" or DRIVER_LEASES not in item.stash or marked_of(item) is not None:
            return report
        if self._is_missing:
            self._is_missing = False
            missing = report.accel_missing = missing_leases(item)  # type: ignore[attr-defined]
            path, line, _ = item.location
            if report.skipped:
                report.longrepr = (path, (line or 0) + 1, f"Skipped: {missing}")
        error = None if call.excinfo is None else call.excinfo.value
        if not remote_exceptions.has_run(error) and hasattr(report, "wasxfail"):
            del report.wasxfail  # xfail covers failures of the test, not failures to run it.
            report.outcome = "failed"
        return report
