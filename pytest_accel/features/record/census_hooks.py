"""Record what became of each test of a session. Registered only with ``--accel-record``.

The process that collects (under xdist each worker) knows the deselected tests and what a test needs. It hands the list
of tests to the controller, and adds the need to the report of a test. The controller records both as one event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pytest_accel.core.node_refs import NodeRef, reference
from pytest_accel.core.record_events import DevicesThere, MissingNeed, Outcome, Recorder, Status, TestsCounted
from pytest_accel.core.shims import reason_of_skip
from pytest_accel.core.stash_keys import MARKED, VARIANT

if TYPE_CHECKING:
    from pytest_accel.driver.items import MarkedItem
    from pytest_accel.item_redirection import Redirector
    from pytest_accel.session import AccelSession

NOT_RUN = Outcome(Status.NOT_RUN)
DESELECTED = Outcome(Status.DESELECTED)
_STRONGEST_FIRST = tuple(Status)
_OWN_ID = "accel_census_id"
"""Attribute of a report with the id of its test in the census, if the node id does not identify the test."""
_CHANNEL = "accel_census"
"""Key of xdist's `workerinput` for the channel through which a worker sends the list of its tests."""
_SELECTION = {
    "keyword": "-k",
    "markexpr": "-m",
    "deselect": "--deselect",
    "lf": "--last-failed",
    "stepwise": "--stepwise",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
}
"""pytest's options that select tests, by their names in the namespace of options."""


def register(session: AccelSession, record: Recorder | None) -> None:
    """Register the hooks of this process. `record` receives the event; None in a worker of xdist."""
    plugins = session.config.pluginmanager
    if record is None:
        assert session.worker_input is not None
        send = session.worker_input[_CHANNEL].send
        plugins.register(CollectionCensus(session, send), "accel-census-collection")
        return
    recorder = CensusRecorder(session, record)
    plugins.register(recorder, "accel-census")
    plugins.register(CollectionCensus(session, recorder.collections.add), "accel-census-collection")


@dataclass(frozen=True, slots=True)
class CollectedTests:
    """The tests that one process has collected."""

    selected: list[str]
    """Ids of the tests to run."""
    deselected: list[str]
    own_ids: dict[str, str]
    """The ids of tests to which xdist has added their group (``--dist loadgroup``), by the id with the group."""

    def pack(self) -> str:
        """Return a text for xdist's connection, which cannot carry all characters of ids."""
        return json.dumps([self.selected, self.deselected, self.own_ids])

    @classmethod
    def unpack(cls, data: str) -> CollectedTests:
        return cls(*json.loads(data))


class CollectionCensus:
    """Records the tests that one process collects, and what those need that it cannot run."""

    def __init__(self, session: AccelSession, hand_over: Callable[[str], None]) -> None:
        """`hand_over` is called with the packed :class:`CollectedTests` once the collection is complete."""
        self._session = session
        self._hand_over = hand_over
        self._collected: dict[int, tuple[pytest.Item, str]] = {}
        """The collected tests with their ids before xdist adds groups, by `id()`: their hash depends on the node id."""
        self._deselected: list[pytest.Item] = []
        self._numbered: dict[int, str] = {}
        """The ids of tests whose node id an earlier test of the collection has, by `id()` of the test."""
        self._is_complete = False
        """True after a collection that nothing has interrupted."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        self._collected = {id(item): (item, item.nodeid) for item in items}
        result = yield
        self._is_complete = True
        return result

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._deselected += items

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, object, object]:
        result = yield
        if not self._is_complete:
            return result
        for item in session.items:  # Hooks may have made some late, as for lists in marks.
            self._collected.setdefault(id(item), (item, item.nodeid))
        self._number_equal_ids()
        selected = [(item, self._own_id(item)) for item in session.items]
        # Some plugins remove tests from the list and do not report it.
        removed = self._collected.keys() - set(map(id, session.items))
        # A test that was divided into variants is not left out.
        gone = (item for number in removed if (item := self._collected[number][0]).stash.get(VARIANT, True) is not None)
        left_out = (*self._deselected, *gone)
        deselected = set(map(self._own_id, left_out))
        own_ids = {item.nodeid: own for item, _ in selected if (own := self._without_group(item)) != item.nodeid}
        self._hand_over(CollectedTests([own for _, own in selected], sorted(deselected), own_ids).pack())
        return result

    def _number_equal_ids(self) -> None:
        """Give ids of their own to tests that have the node id of an earlier one.

        The order of the collection is the same in all jobs, that of the tests to run is not.
        """
        known: dict[str, dict[NodeRef, int]] = {}
        for key, (item, _) in self._collected.items():
            own = self._without_group(item)
            numbers = known.setdefault(own, {})
            number = numbers.setdefault(reference(item), len(numbers) + 1)  # A file may have been collected twice.
            if number > 1:
                self._numbered[key] = f"{own}#{number}"

    def _own_id(self, item: pytest.Item) -> str:
        """Return the id of `item` in the census."""
        return self._numbered.get(id(item)) or self._without_group(item)

    def _without_group(self, item: pytest.Item) -> str:
        """Return the node id of `item` without the group that xdist adds."""
        _, own = self._collected.get(id(item), (item, item.nodeid))
        return own if item.nodeid.startswith(f"{own}@") else item.nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the id if the node id is not enough; the need, and the devices there, if the test cannot run here."""
        report = yield
        if (own := self._numbered.get(id(item))) is not None:
            setattr(report, _OWN_ID, own)
        marked: MarkedItem | None = item.stash.get(MARKED, None)
        if marked is not None and hasattr(report, "accel_missing"):
            need = self._redirector.needs(marked.plan)
            # Plain data, which xdist can send.
            report.accel_need = need._asdict()  # type: ignore[attr-defined]
            there = msgspec.to_builtins(self._there(need.kind)) if need.devices else None
            report.accel_there = there  # type: ignore[attr-defined]
        return report

    @cached_property
    def _redirector(self) -> Redirector:
        from pytest_accel.item_redirection import Redirector

        return Redirector(self._session)

    def _there(self, kind: str) -> DevicesThere:
        machine = self._session.machine
        inventory = machine.session if kind == "none" else machine.of(kind)
        return DevicesThere(kind, len(inventory.devices))


class CensusRecorder:
    """Records the verdicts of a session's tests, all in one event when the session ends. In the controller only."""

    def __init__(self, session: AccelSession, record: Recorder) -> None:
        self._session = session
        self._record = record
        self.collections: set[str] = set()
        """The packed :class:`CollectedTests` of all processes that have collected: one, unless workers disagree.

        Threads that receive messages of xdist's workers add to it.
        """
        self._collection_failed = False
        self._skipped_files: dict[str, str] = {}
        self._verdicts: dict[str, Outcome] = {}
        """Outcomes of the tests whose last phase has been reported, by the id in their reports."""
        self._running: dict[tuple[object, str], Outcome] = {}
        """Outcomes so far of the tests that have begun, by xdist's worker (None: there is none) and id."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        channel = node.gateway.newchannel()
        node.workerinput[_CHANNEL] = channel
        channel.setcallback(self.collections.add)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collection_failed = True
        elif report.skipped:
            self._skipped_files[report.nodeid] = reason_of_skip(report.longrepr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test: str = getattr(report, _OWN_ID, report.nodeid)
        run = (getattr(report, "node", None), test)
        if report.when not in ("call", "teardown"):  # "setup", or "???" if the test's process has crashed.
            self._running[run] = NOT_RUN
        if run not in self._running:
            return  # xdist's worker tears down the fixtures of a test that runs elsewhere.
        self._running[run] = _stronger(self._running[run], _outcome(report))
        if report.when not in ("setup", "call"):  # An interrupted test, or one that is run again, does not get here.
            _add(self._verdicts, test, self._running.pop(run))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Record the event. `RecordHooks` reports errors of writing."""
        config, tests = self._session.config, self._tests()
        complete = (
            bool(self.collections)
            and not self._collection_failed
            and not config.getoption("lf", False)  # pytest does not collect the tests that --last-failed leaves out.
            and all(outcome.status is not Status.NOT_RUN for outcome in tests.values())
        )
        selection = msgspec.to_builtins(self._selection(), enc_hook=str)
        self._record(
            TestsCounted(selection, complete, bool(config.option.collectonly), tests, dict(self._skipped_files))
        )

    def _selection(self) -> dict[str, object]:
        """Return the options that select tests, and the arguments that name some."""
        config, settings = self._session.config, self._session.settings
        selection = {flag: config.getoption(name, None) for name, flag in _SELECTION.items()}
        selection["--accel-select"] = settings.select
        selection["--accel-shard"] = settings.shard and "/".join(map(str, settings.shard))
        return {**{flag: value for flag, value in selection.items() if value}, "arguments": config.args}

    def _tests(self) -> dict[str, Outcome]:
        """Return the outcomes of all collected tests by their own ids."""
        tests: dict[str, Outcome] = {}
        own_ids: dict[str, str] = {}
        for found in map(CollectedTests.unpack, self.collections):
            own_ids |= found.own_ids
            for nodeid in found.selected:
                _add(tests, nodeid, NOT_RUN)
            for nodeid in found.deselected:
                _add(tests, nodeid, DESELECTED)
        for nodeid, outcome in self._verdicts.items():
            _add(tests, own_ids.get(nodeid, nodeid), outcome)
        return tests


def _add(outcomes: dict[str, Outcome], nodeid: str, outcome: Outcome) -> None:
    """Add the outcome of one run of a test to `outcomes`."""
    outcomes[nodeid] = _stronger(outcomes.get(nodeid, outcome), outcome)


def _stronger(one: Outcome, other: Outcome) -> Outcome:
    """Return the outcome that counts of two runs, or phases, of a test."""
    return min(one, other, key=lambda outcome: _STRONGEST_FIRST.index(outcome.status))


def _outcome(report: pytest.TestReport) -> Outcome:
    """Return the outcome of a test by the report of one of its phases alone."""
    need: dict[str, Any] | None = getattr(report, "accel_need", None)
    if need is not None:
        there: dict[str, Any] | None = getattr(report, "accel_there", None)
        reason: str = getattr(report, "accel_missing", "")
        devices = None if there is None else msgspec.convert(there, DevicesThere)
        return Outcome(Status.MISSING, reason, msgspec.convert(need, MissingNeed), devices)
    if report.failed:
        return Outcome(Status.ERROR if report.when in ("setup", "teardown") else Status.FAILED)
    expected: str | None = getattr(report, "wasxfail", None)
    if report.skipped:
        if expected is None:
            return Outcome(Status.SKIPPED, reason_of_skip(report.longrepr))
        if report.when != "setup":
            return Outcome(Status.XFAILED)
        # xfail(run=False), or a fixture that fails as expected. pytest 8 puts "reason: " in front.
        return Outcome(Status.SKIPPED, expected.removeprefix("reason: ") or "expected failure in setup")
    if report.passed and report.when == "call":
        return Outcome(Status.PASSED if expected is None else Status.XPASSED)
    return NOT_RUN  # Setup or teardown passed, or a plugin will run the test again.
