"""Named resources: licenses, ports, memory and CPU cores that tests need besides devices, or in place of them.

A project names them in its ini file (``accel_resources = license: 2, port-9000: 1``). This adds the mark ``needs``,
with which a test leases some of them and stays in its process, and the fixture `accel_resources`, which says which
ones. A project without the setting may have a mark and a fixture of these names of its own.

To the kernel, a named resource is a kind of device (`hardware/vendors/named.py`) with the usual leases, locks and
queue: ``devices(1, kind="license")`` needs nothing of this feature. It leaves `DriverLeases` on items, and gets each
lease through the pool client.

Tests: ``tests/features/resources``. Page: ``docs/how-to/xdist.md``.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.marks import NEEDS, MarkError, mark_text
from pytest_accel.core.stash_keys import DRIVER_LEASES, MARKED, SESSION
from pytest_accel.core.units import format_memory, parse_memory
from pytest_accel.core.world_key import DriverLeases, WorldKey
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import shortfall

if TYPE_CHECKING:
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


def pytest_report_header(config: pytest.Config) -> str:
    named = config.stash[SESSION].settings.resources
    shown = (f"{name} {format_memory(count) if name == 'memory' else count}" for name, count in named)
    return f"accel: resources of tests: {', '.join(shown)}"


def pytest_accel_read_needs(session: AccelSession, items: Sequence[pytest.Item]) -> dict[pytest.Item, str]:
    """Store the leases of each test with the mark; return an error for each test whose marks are wrong."""
    errors: dict[pytest.Item, str] = {}
    for item in items:
        if DRIVER_LEASES not in item.stash and (marks := tuple(item.iter_markers(NEEDS))):
            try:
                item.stash[DRIVER_LEASES] = leases(marks, session.machine)
            except MarkError as error:
                errors[item] = str(error)
    return errors


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Register the hooks after those of all other plugins: they must get the leases before others begin a test."""
    config = session.config
    # Another plugin may run the loop a second time.
    if SESSION in config.stash and not config.pluginmanager.has_plugin(_PLUGIN):
        config.pluginmanager.register(_LeaseHooks(config.stash[SESSION]), _PLUGIN)


@pytest.fixture
def accel_resources(request: pytest.FixtureRequest) -> dict[str, tuple[int, ...]]:
    """Return which of the named resources the test has: ``{"license": (1,)}``."""
    if SESSION not in request.config.stash:
        pytest.fail(
            "the fixture 'accel_resources' has a value only in tests without the marks devices and distributed: "
            "the process that reports this test holds what it needs",
            pytrace=False,
        )
    hooks: Any = request.config.pluginmanager.get_plugin(_PLUGIN)
    numbers: dict[str, tuple[int, ...]] = {}
    for device in hooks.devices:
        numbers[device.kind] = (*numbers.get(device.kind, ()), device.index)
    return numbers


class _LeaseHooks:
    """Leases what a test needs before its phases, and returns it after them. Not used in ranks.

    No limit of the test's time includes the wait, and reruns of a test (pytest-rerunfailures) use the same leases.
    """

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._error: BaseException | None = None
        """The reason why the running test has no leases, as its setup raises it."""
        self.devices: tuple[Device, ...] = ()
        """The devices that the running test has leased."""

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
        from pytest_accel.verdict import phase_verdict

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
        missing = item.stash.get(DRIVER_LEASES, DriverLeases(())).missing
        if missing is not None and call.excinfo is not None and call.excinfo.value is self._error:
            report.accel_missing = missing  # type: ignore[attr-defined]
            if report.skipped:
                path, line, _ = item.location
                report.longrepr = (path, (line or 0) + 1, f"Skipped: {missing}")
        return report


def _check_marks(item: pytest.Item) -> None:
    """Fail a test whose marks have changed since its collection: its leases do not match them."""
    __tracebackhide__ = True
    if tuple(item.iter_markers(NEEDS)) != item.stash.get(DRIVER_LEASES, DriverLeases(())).marks:
        from pytest_accel.verdict import phase_verdict

        raise phase_verdict.not_run(
            "the marks needs of the test were changed after collection; change them in pytest_collection_modifyitems"
        )


def leases(marks: tuple[pytest.Mark, ...], machine: Machine) -> DriverLeases:
    """Return the leases of a test with these `marks`, or why it can have none.

    For each name, the largest number in any mark counts.
    Raise :class:`MarkError` for an argument that is not allowed.
    """
    names = tuple(machine.resources)
    counts: dict[str, int] = {}
    for mark in marks:
        head = f"@pytest.mark.{mark_text(mark)}"
        if not names:
            raise MarkError(
                f"{head}: accel_resources, which names the resources of tests, is not set in the ini file; if the mark "
                "is the project's own, register it in markers"
            )
        given = [pair for argument in (*mark.args, mark.kwargs) for pair in _pairs(argument)]
        if not given:
            raise MarkError(f"{head}: needs at least one of {', '.join(names)}")
        for name, value in given:
            if name not in names:
                raise MarkError(
                    f"{head}: there is no resource {name!r} in accel_resources, allowed are {', '.join(names)}"
                )
            count = _count(f"{head}: {name}", value, machine.of(name).devices[0])
            counts[name] = max(count, counts.get(name, 0))
    # Sorted by name: all tests request their leases in one order.
    needs = {name: DeviceNeed(count, kind=name) for name, count in sorted(counts.items())}
    keys = tuple(WorldKey(name, need, 0, grouped=False) for name, need in needs.items())
    missing = filter(None, (shortfall(need, machine.of(name)) for name, need in needs.items()))
    return DriverLeases(keys, "; ".join(missing) or None, marks)


def _pairs(argument: Any) -> list[tuple[Any, object]]:
    """Return the names in an argument, each with its number, or with None if the argument is only a name."""
    return list(argument.items()) if isinstance(argument, Mapping) else [(argument, None)]


def _count(head: str, value: object, device: Device) -> int:
    """Return how many devices like `device` the `value` of a name stands for; `head` begins the text of an error."""
    allowed = "an int >= 1"
    if device.memory is not None:
        allowed = 'a positive size such as "8GiB", a positive int of bytes'
        with suppress(ValueError):
            return -(-parse_memory(value) // device.memory)
    elif value is None:
        return 1
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise MarkError(f"{head} must be {allowed}, got {value!r}")
