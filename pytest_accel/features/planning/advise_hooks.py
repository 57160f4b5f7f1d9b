"""Hooks of ``--accel-advise``: they measure the tests, and show advice at the end. Registered with this option only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.core.clock import monotonic
from pytest_accel.core.marks import MarkFinder, mark_text
from pytest_accel.core.stash_keys import DEVICE_PEAKS, MARKED, OWNERS
from pytest_accel.features.planning.forecast import Forecast, SuiteOnMachine

if TYPE_CHECKING:
    from pytest_accel.features.order.test_demand import Demand
    from pytest_accel.features.planning.advice import Measurement
    from pytest_accel.session import AccelSession

_RUN = "accel_run"
"""Name of the property with the marks of a test and the seconds that it has waited for its world."""
_TURN = "accel_turn"
"""Attribute of a report: number of earlier tests of the collection with the node id of its test; absent if 0."""


def register(session: AccelSession) -> None:
    """Register the hooks that this process needs: each runs tests or shows the summary, or both."""
    session.config.pluginmanager.register(LateRegistration(), "accel-late-registration")
    if not session.is_worker:
        session.config.pluginmanager.register(AdviseHooks(session), "accel-advice")


class LateRegistration:
    """Registers the :class:`MeasuringHooks` when the tests begin, so that their wrapper is outside of all others."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        session.config.pluginmanager.register(MeasuringHooks(session), "accel-measuring")


class MeasuringHooks:
    """Adds a test's marks, and the time that it has waited for its world, to its reports. One for each driver."""

    def __init__(self, session: pytest.Session) -> None:
        self._adoption: Any = session.config.pluginmanager.get_plugin("accel-adoption")
        turns = _with_turns([item.nodeid for item in session.items])
        self._turns = {id(item): turn for item, (_, turn) in zip(session.items, turns, strict=True) if turn}
        self._finder = MarkFinder(session.config.stash[OWNERS])
        self._item: pytest.Item | None = None
        """The running test, if it is marked, until its reports begin."""
        self._began = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._item = item if MARKED in item.stash else None
        self._began = monotonic()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Measure the time from the start of the test's protocol: the driver gets the world in between."""
        item, self._item = self._item, None
        if item is not None:
            marks = [mark for mark in self._finder.find(item) if mark is not None]
            by_rule = self._adoption is not None and all(self._adoption.is_by_rule(mark) for mark in marks)
            run = {
                "marks": [mark_text(mark) for mark in marks],
                "by_rule": by_rule,
                "waited": monotonic() - self._began,
            }
            item.user_properties.append((_RUN, run))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if (turn := self._turns.get(id(item))) is not None:
            setattr(report, _TURN, turn)
        return report


_TestKey = tuple[str, int]
"""Node id of a test, and the number of earlier tests of the collection with the same one."""


@dataclass(slots=True)
class _Test:
    """The reports of one test."""

    seconds: float = 0.0
    """Sum of its phases."""
    passed: bool = True
    ran: bool = False
    """True if its call phase was not skipped."""
    properties: dict[str, Any] = field(default_factory=dict)


class AdviseHooks:
    """Collects the reports of a session's tests, and shows the advice. Registered in the controller."""

    def __init__(self, session: AccelSession) -> None:
        self._session = session
        self._collection: Sequence[_TestKey] = ()
        self._items: Sequence[pytest.Item] = ()
        """The tests of this process; none under xdist."""
        self._tests: dict[_TestKey, _Test] = {}
        self._workers = 1
        """Number of xdist's workers; 1 without xdist."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[object]) -> None:
        self._workers = len(specs)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._items = session.items
        self._collection = _with_turns([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._collection = _with_turns(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = report.nodeid, getattr(report, _TURN, 0)
        if report.when == "setup" or key not in self._tests:
            self._tests[key] = _Test()  # The last run of a test counts, if it is rerun.
        test = self._tests[key]
        test.seconds += report.duration
        test.passed &= report.passed
        test.ran |= report.when == "call" and not report.skipped
        given: Iterable[tuple[object, object]] = report.user_properties  # pytest accepts names of any type.
        test.properties.update((name, value) for name, value in given if isinstance(name, str))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from pytest_accel.features.planning import advice
        from pytest_accel.hardware.vendors.cpu import cpu_slots

        terminalreporter.section("accel: advice (--accel-advise)", sep="-")
        measurements = [measurement for key in self._collection if (measurement := self._measurement(key)) is not None]
        machine, demand = self._session.machine, self._demand()
        kinds = {machine.session.kind, *(key.kind for key in (demand.keys if demand is not None else ()))} - {"none"}
        devices = {device.id: device for kind in kinds for device in machine.of(kind).devices}
        suite = self._suite()
        lines = [
            *advice.about_marks(measurements, devices, self._session.settings.share),
            *advice.about_waiting(measurements),
            *(
                [f"no advice on -n: {suite}"]
                if isinstance(suite, str)
                else advice.about_workers(suite, _forecasts(suite, cpu_slots()), self._workers)
            ),
        ]
        for line in lines:
            terminalreporter.write_line(line)

    def _measurement(self, key: _TestKey) -> Measurement | None:
        """Return the measurement of a marked test that has passed; None for another test."""
        from pytest_accel.features.planning.advice import Measurement

        test = self._tests.get(key)
        if test is None or not (test.passed and test.ran) or _RUN not in test.properties:
            return None
        run, properties = test.properties[_RUN], test.properties
        peaks = [properties[name] for name in properties if name.startswith(DEVICE_PEAKS)]  # In the order of ranks.
        return Measurement(
            key[0],
            tuple(run["marks"]),
            run["by_rule"],
            tuple(properties["accel_devices"].split(",")) if "accel_devices" in properties else (),
            tuple(map(tuple, peaks)),
            test.seconds,
            run["waited"],
        )

    def _demand(self) -> Demand | None:
        """Return the needs of the collected tests, as far as this process knows them."""
        from pytest_accel.features.order.test_demand import Demand

        hooks: Any = self._session.config.pluginmanager.get_plugin("accel-xdist")
        if hooks is not None:
            demand: Demand | None = hooks.demand
            return demand
        marked = ((index, item.stash.get(MARKED, None)) for index, item in enumerate(self._items))
        keys = [(index, one.key) for index, one in marked if one is not None and one.missing is None]
        return Demand.of(keys) if keys else None

    def _suite(self) -> SuiteOnMachine | str:
        """Return the tests that have run, for a simulation of this machine; or why there can be none."""
        from pytest_accel.features.order.history import recall
        from pytest_accel.hardware.vendors.cpu import cpu_slots

        demand = self._demand()
        if demand is None:
            return "the order of the tests is xdist's, or no test needs devices or ranks"
        ran = [index for index, key in enumerate(self._collection) if key in self._tests]
        ran = [index for index in ran if self._tests[self._collection[index]].ran]
        if not ran:
            return "no test has run"
        keys = {index: demand.keys[number] for index, number in demand.tests}
        tests = [(self._collection[index][0], keys.get(index)) for index in ran]
        suite = SuiteOnMachine.of(tests, recall(self._session.config), self._session.machine, cpu_slots())
        unknown = suite.times.unknown
        if 2 * unknown > len(ran):
            return f"the times of {unknown} of {len(ran)} tests are not stored; only tests that pass have times"
        return suite


def _with_turns(nodeids: Iterable[str]) -> list[_TestKey]:
    """Return each of `nodeids` with the number of equal ones before it."""
    turns: Counter[str] = Counter()
    keys = []
    for nodeid in nodeids:
        keys.append((nodeid, turns[nodeid]))
        turns[nodeid] += 1
    return keys


def _forecasts(suite: SuiteOnMachine, slots: int) -> list[Forecast]:
    """Return the simulated sessions with a number of workers that this machine can run."""
    most = max(slots, 2 * suite.devices)
    return [forecast for forecast in suite.forecasts() if forecast.workers <= most]
