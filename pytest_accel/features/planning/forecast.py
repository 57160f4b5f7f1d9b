"""Forecasts of a session, made by the real scheduler under a virtual clock, and lower bounds of its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median

from pytest_accel.core.units import count_text
from pytest_accel.features.order.backlog import GUESS
from pytest_accel.features.order.scheduler import DeviceScheduling
from pytest_accel.features.order.stored_durations import Durations, expected, expected_times
from pytest_accel.features.order.test_demand import Demand, Wanted
from pytest_accel.features.planning import simulation
from pytest_accel.features.planning.simulation import SimulatedTest, Span
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import noun
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request


def suite_lower_bound(tests: Sequence[tuple[Sequence[Request], float]], slots: int) -> float:
    """Return a lower bound of the seconds for `tests` (requests with seconds), for any order and number of workers.

    `slots` is the number of CPU slots. Tests that can run on some of the devices only are also bounded by these alone.
    """
    bounds = [max((seconds for _, seconds in tests), default=0.0)]
    each = [(request, seconds) for requests, seconds in tests for request in requests]
    on_slots = [(float(request.slots), seconds) for request, seconds in each if request.slots]
    if on_slots:
        bounds.append(lower_bound(on_slots, slots, math.inf))
    on_devices = [
        (frozenset(request.candidates), request.count * min(request.parts, default=WHOLE) / WHOLE, seconds)
        for request, seconds in each
        if request.count
    ]
    for some in {names for names, _, _ in on_devices}:
        within = [(count, seconds) for names, count, seconds in on_devices if names <= some]
        bounds.append(lower_bound(within, len(some), math.inf))
    return max(bounds)


def lower_bound(tests: Iterable[tuple[float, float]], devices: int, workers: float) -> float:
    """Return a lower bound of the seconds for `tests`, each a number of devices (parts as fractions) and seconds.

    The bound is the maximum of: the longest test; the sum of all times, divided by the number of workers; and, for
    several measures of a test's size, the sum of size times seconds. Under each measure, the sizes of tests that run at
    the same time add up to at most 1. The measures are the dual feasible functions of Fekete and Schepers ("New classes
    of fast lower bounds for bin packing problems", 2001): under u_k, a test that fits only k times at the same time has
    the size 1/k.
    """
    longest = 0.0
    totals: dict[float, float] = {}
    for count, seconds in tests:
        longest = max(longest, seconds)
        totals[count] = totals.get(count, 0.0) + seconds
    bounds = [longest, sum(totals.values()) / workers]
    for measure in measures(devices):
        bounds.append(sum(measure(count / devices) * seconds for count, seconds in totals.items()))
    return max(bounds)


def measures(devices: int) -> Iterator[Callable[[float], float]]:
    """Yield the measures of a test's size, each a function of the fraction of the `devices` that the test takes."""
    for pieces in range(devices + 1):
        yield partial(_measure, pieces=pieces)


def _measure(size: float, pieces: int) -> float:
    """Return u_k(size) of Fekete and Schepers for k = `pieces`; the size itself if `pieces` is 0."""
    scaled = size * (pieces + 1)
    if pieces == 0 or abs(scaled - round(scaled)) < 1e-9:
        return size
    return int(scaled) / pieces


EQUALLY_GOOD = 0.02
"""Sessions that take at most this fraction longer than the shortest one count as equally good."""


@dataclass(frozen=True, slots=True)
class Times:
    """The assumed times of the tests."""

    expected: tuple[float | None, ...]
    """Seconds remembered for the kind of device that each test will run on, as the scheduler would know them."""
    seconds: tuple[float, ...]
    """Assumed seconds of each test: those in `expected`, else those of another kind of device, else `guess`."""
    elsewhere: int
    """Number of tests whose time is remembered for another kind of device only."""
    unknown: int
    """Number of tests without any remembered time."""
    guess: float
    """Seconds assumed for each of these."""


def assumed_times(durations: Durations, tests: Sequence[tuple[str, str]]) -> Times:
    """Return the times of `tests`, each a node id and a kind of device.

    A test without any remembered time is assumed to take the median of the others.
    """
    here = expected_times(durations, tests)
    there = [_anywhere(durations.get(nodeid, {})) for nodeid, _ in tests]
    known = [other if one is None else one for one, other in zip(here, there, strict=True)]
    timed = [one for one in known if one is not None]
    guess = median(timed) if timed else GUESS
    return Times(
        tuple(here),
        tuple(guess if one is None else one for one in known),
        len(timed) - sum(one is not None for one in here),
        len(tests) - len(timed),
        guess,
    )


def _anywhere(by_kind: Mapping[str, Sequence[float]]) -> float | None:
    """Return the longest expected time of a test on any kind of device, or None."""
    found = [seconds for values in by_kind.values() if (seconds := expected(values)) is not None]
    return max(found, default=None)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The simulated session with one number of workers."""

    workers: int
    spans: tuple[Span, ...]
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

    def utilisation(self, devices: int) -> float:
        """Return the fraction of the time of all `devices` for which tests hold them."""
        return self.device_seconds / (devices * self.makespan) if self.makespan else 0.0


class SuiteOnMachine:
    """The tests that can run on a machine, and the machine."""

    def __init__(self, collection: Sequence[str], demand: Demand, times: Times, machine: Machine, slots: int) -> None:
        """`collection` has the node ids of the tests; `slots` is the number of CPU slots."""
        self.collection = list(collection)
        self._demand = demand
        self.times = times
        self._machine = machine
        self.slots = slots
        self.requests = demand.requests(len(collection), machine, slots)
        """The devices, CPU slots and named resources that each test takes, those of its world first."""
        self._free = demand.devices(machine)
        self._named = frozenset(device.id for kind in machine.resources for device in machine.of(kind).devices)
        self.devices = len(({device.id for device in machine.session.devices} | self._free.keys()) - self._named)
        """Number of devices of the session, including those that no test uses."""

    @classmethod
    def of(
        cls, tests: Sequence[tuple[str, Wanted]], durations: Durations, machine: Machine, slots: int
    ) -> SuiteOnMachine:
        """Make a suite of node ids with what the tests need."""
        demand = Demand.of(one for _, one in tests)
        kinds = demand.kinds_of_tests(len(tests))
        node_ids = [nodeid for nodeid, _ in tests]
        return cls(node_ids, demand, assumed_times(durations, list(zip(node_ids, kinds, strict=True))), machine, slots)

    def part(self, indices: Sequence[int]) -> SuiteOnMachine:
        """Return the suite of some of the tests."""
        numbers = {index: number for number, index in enumerate(indices)}
        tests = tuple((numbers[index], key) for index, key in self._demand.tests if index in numbers)
        times = replace(
            self.times,
            expected=tuple(self.times.expected[index] for index in indices),
            seconds=tuple(self.times.seconds[index] for index in indices),
        )
        node_ids = [self.collection[index] for index in indices]
        return SuiteOnMachine(node_ids, replace(self._demand, tests=tests), times, self._machine, self.slots)

    def takes(self, index: int) -> str:
        """Return a text like ``2 devices`` or ``1 CPU slot``; empty for a test that only needs a worker."""
        texts = []
        for request in self.requests[index]:
            kind = request.candidates[0].rpartition("-")[0] if request.candidates else ""
            count, word = (request.count, "device") if request.count else (request.slots, "CPU slot")
            texts.append(count_text(count, noun(kind) if kind in self._machine.resources else word))
        return ", ".join(texts)

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the makespan in seconds, for any order of tests and any number of workers."""
        return suite_lower_bound(list(zip(self.requests, self.times.seconds, strict=True)), self.slots)

    def forecast(self, workers: int) -> Forecast:
        """Simulate the session with ``-n workers``, and return the result."""
        tests = zip(self.collection, self.times.seconds, self.requests, strict=True)
        jobs = [SimulatedTest(nodeid, seconds, requests) for nodeid, seconds, requests in tests]
        machine = simulation.SimulatedMachine(jobs, self._free, workers, self.slots)
        backlog = self._demand.backlog(self.collection, self._machine, self.slots, self.times.expected)
        scheduler = DeviceScheduling(
            self.collection, backlog, self._free, self.slots, machine, clock=lambda: machine.now
        )
        machine.simulate(scheduler)
        return Forecast(workers, tuple(machine.spans), self._named)

    def forecasts(self) -> Iterator[Forecast]:
        """Yield the forecasts for 1, 2, 4, ... workers, up to the first that does not make the session shorter."""
        workers, last = 1, float("inf")
        while True:
            forecast = self.forecast(workers)
            yield forecast
            if forecast.makespan > last * (1 - EQUALLY_GOOD) or workers >= len(self.collection):
                return
            workers, last = 2 * workers, forecast.makespan

    def remaining(self, ended: Mapping[str, int], running: Iterable[tuple[str, float]], workers: int) -> float | None:
        """Return the seconds that the tests which have not ended take at least with `workers`.

        Return None if the times of more than half of the tests are unknown. `ended` has the number of tests with a node
        id that have ended, and `running` the node id of each running test, with the seconds that it has taken.
        """
        if 2 * self.times.unknown > len(self.collection):
            return None
        ends = Counter(ended)
        taken: dict[str, list[float]] = {}
        for test, seconds in running:
            taken.setdefault(test, []).append(seconds)
        left = []
        for test, requests, seconds in zip(self.collection, self.requests, self.times.seconds, strict=True):
            if ends[test]:
                ends[test] -= 1
            else:
                left.append((requests, max(0.0, seconds - (taken[test].pop() if taken.get(test) else 0.0))))
        return max(suite_lower_bound(left, self.slots), sum(seconds for _, seconds in left) / workers)


def best(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the forecast with the fewest workers among those whose session is about as short as the shortest."""
    shortest = min(forecast.makespan for forecast in forecasts)
    return min((one for one in forecasts if one.makespan <= shortest * (1 + EQUALLY_GOOD)), key=lambda one: one.workers)


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """Return the critical path of a session: the last test to end, preceded by the test that it waited for, and so on.

    `spans` are in the order in which the tests end. If several tests end when a test begins, it has waited for one
    whose device it gets, else for one on its worker, else for the last of them.
    """
    ending: dict[float, list[int]] = {}
    for number, span in enumerate(spans):
        ending.setdefault(span.end, []).append(number)
    path: list[Span] = []
    position: int | None = len(spans) - 1 if spans else None
    while position is not None:
        span = spans[position]
        path.append(span)
        names = {device for device, _ in span.devices}
        before = [number for number in ending.get(span.begin, ()) if number < position]
        position = max(
            before,
            key=lambda number: (_has_one_of(spans[number], names), spans[number].worker == span.worker, number),
            default=None,
        )
    return path[::-1]


def _has_one_of(span: Span, names: set[str]) -> bool:
    return any(device in names for device, _ in span.devices)
