"""Forecasts of a session: the rule of the order of tests under a virtual clock. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from pytest_accel.core.units import count_text
from pytest_accel.features.order.rule import GUESS, RunOrder
from pytest_accel.features.order.stored_durations import Durations, expected, expected_times
from pytest_accel.features.order.test_demand import Demand, Wanted
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import noun
from pytest_accel.hardware.shares import WHOLE

EQUALLY_GOOD = 0.02
"""Sessions that take at most this fraction longer than the shortest one count as equally good."""


@dataclass(frozen=True, slots=True)
class Span:
    """The simulated run of a test."""

    index: int
    """Index of the test."""
    worker: int
    begin: float
    """Seconds since the start of the session."""
    end: float
    devices: tuple[tuple[str, int], ...]
    """The devices that it held, each with the number of parts."""


def simulate(order: RunOrder, seconds: Sequence[float], workers: int) -> list[Span]:
    """Return the runs of all tests, by their ends, if `workers` run them in `order` and each takes its `seconds`."""
    now, idle = 0.0, list(reversed(range(workers)))
    events: list[tuple[float, int, list[int]]] = []
    spans: list[Span] = []
    while True:
        while idle and (tests := order.start(idle[-1], now, len(idle) - 1)):
            worker, begin = idle.pop(), now
            for index in tests:
                spans.append(Span(index, worker, begin, begin + seconds[index], order.holds(worker)))
                begin += seconds[index]
            heapq.heappush(events, (begin, worker, tests))
        if not events:
            return sorted(spans, key=lambda span: span.end)
        now, worker, tests = heapq.heappop(events)
        for index in tests:
            order.record(index, seconds[index])
        order.end(worker)
        idle.append(worker)


@dataclass(frozen=True, slots=True)
class Times:
    """The assumed times of the tests."""

    expected: tuple[float | None, ...]
    """Seconds stored for the kind of device that each test will run on, as the scheduler would know them."""
    seconds: tuple[float, ...]
    """Assumed seconds of each test: those in `expected`, else those of another kind of device, else `guess`."""
    elsewhere: int
    """Number of tests whose time is stored for another kind of device only."""
    unknown: int
    """Number of tests without any stored time."""
    guess: float
    """Seconds assumed for each of these: the median of the others."""


def assumed_times(durations: Durations, tests: Sequence[tuple[str, str]]) -> Times:
    """Return the times of `tests`, each a node id and a kind of device."""
    here = expected_times(durations, tests)
    anywhere = [[expected(values) for values in durations.get(nodeid, {}).values()] for nodeid, _ in tests]
    known = [
        max(filter(None, other), default=None) if one is None else one
        for one, other in zip(here, anywhere, strict=True)
    ]
    timed = [one for one in known if one is not None]
    guess = median(timed) if timed else GUESS
    seconds = tuple(guess if one is None else one for one in known)
    return Times(tuple(here), seconds, len(timed) - len(here) + here.count(None), len(tests) - len(timed), guess)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The simulated session with one number of workers."""

    workers: int
    spans: Sequence[Span]
    """The tests, in the order in which they end."""
    named: frozenset[str] = frozenset()
    """The ids of named resources among the devices that tests hold."""

    @property
    def makespan(self) -> float:
        """Seconds from the start of the session to the end of the last test."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def device_seconds(self) -> float:
        """Sum of the seconds for which tests hold devices; parts of a device count as fractions."""
        held = ((span.end - span.begin, name, parts) for span in self.spans for name, parts in span.devices)
        return sum(parts * seconds for seconds, name, parts in held if name not in self.named) / WHOLE

    def critical_path(self) -> list[Span]:
        """Return the last test to end, preceded by the test that it waited for, and so on.

        If several tests end when a test begins, it has waited for one whose device it gets, else for its worker's.
        """
        path: list[Span] = []
        position = len(self.spans) - 1
        while position >= 0:
            span = self.spans[position]
            path.insert(0, span)
            names = {device for device, _ in span.devices}
            before = [number for number in range(position) if self.spans[number].end == span.begin]

            def rank(number: int, span: Span = span, names: set[str] = names) -> tuple[bool, bool, int]:
                one = self.spans[number]
                return any(device in names for device, _ in one.devices), one.worker == span.worker, number

            position = max(before, key=rank, default=-1)
        return path


class SuiteOnMachine:
    """The tests that can run on a machine, and the machine."""

    def __init__(self, collection: Sequence[str], demand: Demand, times: Times, machine: Machine, slots: int) -> None:
        """`collection` has the node ids of the tests; `slots` is the number of CPU slots."""
        self.collection = list(collection)
        self.times = times
        self._demand = demand
        self._machine = machine
        self._slots = slots
        needs = demand.needs(machine, slots)
        self.needs = [needs[number] for number in demand.needs_of_tests(len(collection))]
        """The need of each test."""
        self._named = frozenset(device.id for kind in machine.resources for device in machine.of(kind).devices)
        used = {device.id for device in machine.session.devices}.union(demand.devices(machine))
        self.devices = len(used - self._named)
        """Number of devices of the session, including those that no test uses."""

    @classmethod
    def of(
        cls, tests: Sequence[tuple[str, Wanted]], durations: Durations, machine: Machine, slots: int
    ) -> SuiteOnMachine:
        """Make a suite of node ids with what the tests need."""
        demand = Demand.of(one for _, one in tests)
        node_ids = [nodeid for nodeid, _ in tests]
        kinds = demand.kinds_of_tests(len(tests))
        return cls(node_ids, demand, assumed_times(durations, list(zip(node_ids, kinds, strict=True))), machine, slots)

    def takes(self, index: int) -> str:
        """Return a text like ``2 devices`` or ``1 CPU slot``; empty for a test that only needs a worker."""
        texts = []
        for request in self.needs[index].requests:
            kind = request.candidates[0].rpartition("-")[0] if request.candidates else ""
            count, word = (request.count, "device") if request.count else (request.slots, "CPU slot")
            texts.append(count_text(count, noun(kind) if kind in self._machine.resources else word))
        return ", ".join(texts)

    def forecast(self, workers: int) -> Forecast:
        """Simulate the session with ``-n workers``, and return the result."""
        order = self._demand.order(self.collection, self._machine, self._slots, self.times.expected)
        return Forecast(workers, simulate(order, self.times.seconds, workers), self._named)

    def forecasts(self) -> Iterator[Forecast]:
        """Yield the forecasts for 1, 2, 4, ... workers, up to the first that does not make the session shorter."""
        workers, last = 1, float("inf")
        while True:
            forecast = self.forecast(workers)
            yield forecast
            if forecast.makespan > last * (1 - EQUALLY_GOOD) or workers >= len(self.collection):
                return
            workers, last = 2 * workers, forecast.makespan

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the makespan in seconds, for any order of tests and any number of workers."""
        return self._bound(self.times.seconds)

    def _bound(self, seconds: Sequence[float]) -> float:
        loads: dict[tuple[str, ...], float] = {}
        for need, one in zip(self.needs, seconds, strict=True):
            loads[need.candidates] = loads.get(need.candidates, 0.0) + need.size * one
        return max((*loads.values(), *seconds), default=0.0)

    def remaining(self, ended: Mapping[str, int], running: Iterable[tuple[str, float]], workers: int) -> float | None:
        """Return the seconds that the tests which have not ended take at least with `workers`.

        Return None if the times of more than half of the tests are unknown. `ended` has the number of tests with a node
        id that have ended, and `running` the node id of each running test, with the seconds that it has taken.
        """
        if 2 * self.times.unknown > len(self.collection):
            return None
        ends = Counter(ended)
        taken: dict[str, list[float]] = {}  # Several tests may have one node id.
        for test, seconds in running:
            taken.setdefault(test, []).append(seconds)
        left = list(self.times.seconds)
        for index, test in enumerate(self.collection):
            ends[test] -= 1
            passed = left[index] if ends[test] >= 0 else taken[test].pop() if taken.get(test) else 0.0
            left[index] = max(0.0, left[index] - passed)
        return max(self._bound(left), sum(left) / workers)


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the forecast with the fewest workers among those whose session is about as short as the shortest."""
    shortest = min(forecast.makespan for forecast in forecasts)
    return min((one for one in forecasts if one.makespan <= shortest * (1 + EQUALLY_GOOD)), key=lambda one: one.workers)
