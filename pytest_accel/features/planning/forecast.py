"""Forecasts of a session: the rule of the order of tests under a virtual clock. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pytest_accel.core.units import count_text
from pytest_accel.features.order.rule import GUESS, RunOrder
from pytest_accel.features.order.stored_durations import Entries, expected, expected_times
from pytest_accel.features.order.test_demand import Demand
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import noun


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


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """Return the last test to end, preceded by the test that it waited for, and so on.

    If several tests end when a test begins, it has waited for one whose device it gets, else for its worker's.
    """
    path: list[Span] = []
    left = list(spans)
    while left:
        span = left.pop()
        path.insert(0, span)

        def rank(number: int, span: Span = span) -> tuple[bool, bool, int]:
            one = left[number]
            shares = not {name for name, _ in span.devices}.isdisjoint(name for name, _ in one.devices)
            return shares, one.worker == span.worker, number

        del left[1 + max((number for number, one in enumerate(left) if one.end == span.begin), key=rank, default=-1) :]
    return path


@dataclass(frozen=True, slots=True)
class Times:
    """The assumed times of the tests."""

    expected: tuple[float | None, ...]
    """Seconds stored for the kind of device that each test will run on, as the scheduler would know them."""
    seconds: tuple[float, ...]
    """Assumed seconds of each test: those in `expected`, else those of another kind of device, else `guess`."""
    unknown: int
    """Number of tests without any stored time."""
    guess: float
    """Seconds assumed for each of these: the median of the others."""


def assumed_times(stored: Entries, tests: Sequence[tuple[str, str]]) -> Times:
    """Return the times of `tests`, each a node id and a kind of device."""
    here = expected_times(stored, tests)
    elsewhere = ([expected(pairs) for pairs in stored.get(nodeid, {}).values()] for nodeid, _ in tests)
    known = [
        max(filter(None, other), default=None) if one is None else one
        for one, other in zip(here, elsewhere, strict=True)
    ]
    guess = median([one for one in known if one is not None] or [GUESS])
    return Times(tuple(here), tuple(guess if one is None else one for one in known), known.count(None), guess)


class SuiteOnMachine:
    """The tests that can run on a machine, and the machine."""

    def __init__(self, collection: Sequence[str], demand: Demand, times: Times, machine: Machine, slots: int) -> None:
        """`collection` has the node ids of the tests; `slots` is the number of CPU slots."""
        self.collection = list(collection)
        self.times = times
        self._demand, self._machine, self._slots = demand, machine, slots
        needs = demand.needs(machine, slots)
        self.needs = [needs[number] for number in demand.tests]
        """The need of each test."""

    def takes(self, index: int) -> str:
        """Return a text like ``2 devices`` or ``1 CPU slot``; empty for a test that only needs a worker."""
        texts = []
        for request in self.needs[index].requests:
            kind = request.candidates[0].rpartition("-")[0] if request.candidates else ""
            count, word = (request.count, "device") if request.count else (request.slots, "CPU slot")
            texts.append(count_text(count, noun(kind) if kind in self._machine.resources else word))
        return ", ".join(texts)

    def forecast(self, workers: int) -> list[Span]:
        """Return the simulated runs of all tests in a session with ``-n workers``, by their ends."""
        order = self._demand.order(self.collection, self._machine, self._slots, self.times.expected)
        return simulate(order, self.times.seconds, workers)

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
        loads: Counter[tuple[str, ...]] = Counter()
        longest = work = 0.0
        for test, need, seconds in zip(self.collection, self.needs, self.times.seconds, strict=True):
            ends[test] -= 1
            passed = seconds if ends[test] >= 0 else taken[test].pop() if taken.get(test) else 0.0
            left = max(0.0, seconds - passed)
            loads[need.candidates] += need.size * left  # type: ignore[assignment]
            longest, work = max(longest, left), work + left
        return max((*loads.values(), longest, work / workers))
