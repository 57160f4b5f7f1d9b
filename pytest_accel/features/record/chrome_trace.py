"""A trace of recorded sessions for ui.perfetto.dev and chrome://tracing.

In the JSON format of "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Its processes are here the devices of a machine, the workers of a session and the ranks of a session; its threads
are one device, one worker and one rank. Times are microseconds since the first session's start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count, zip_longest
from typing import Any, NamedTuple

from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.features.record.timeline import Session


class _Track(NamedTuple):
    process: int
    number: int


def trace_text(sessions: Sequence[Session]) -> str:
    """Return the trace of `sessions` as a JSON document."""
    trace = _Trace(min(session.span.start for session in sessions))
    for number, session in enumerate(sessions):
        of = f" of session {number}" if len(sessions) > 1 else ""
        trace.add_workers(session, f"workers{of} on {session.host}")
        trace.add_ranks(session, f"ranks{of}")
    trace.add_devices(sessions)
    return json.dumps({"traceEvents": trace.events, "displayTimeUnit": "ms"})


class _Trace:
    """Collects the events of the document."""

    def __init__(self, start: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._start = start
        self._numbers = count(1)
        """Numbers of processes, threads and collectives."""

    def add_workers(self, session: Session, name: str) -> None:
        """Add the phases of tests and the waits for worlds of the processes that run pytest."""
        process = self._process(name)
        for worker in sorted({test.worker for test in session.tests}):
            tests = [test for test in session.tests if test.worker == worker]
            thread = self._thread(process, worker or "pytest")
            phases = sorted((phase for test in tests for phase in test.phases), key=lambda phase: phase.start)
            for phase, following in zip_longest(phases, phases[1:]):
                # The duration of a phase is that in the ranks, which may have begun it before this process.
                stop = phase.stop if following is None else min(phase.stop, following.start)
                self._slice(thread, f"{phase.when} {phase.test}", (phase.start, stop), outcome=phase.outcome)
            if waiting := [test for test in tests if test.waited > 0]:
                thread = self._thread(process, f"{worker or 'pytest'}: waits")
                for test in waiting:
                    start = test.wait[0].at
                    self._slice(thread, "wait", (start, start + test.waited), test=test.test, why=test.why_waited)

    def add_ranks(self, session: Session, name: str) -> None:
        """Add the start of the ranks of each world, and the phases of tests in them."""
        process = self._process(name)
        for number, start in session.worlds.items():
            ready = session.ready.get(number)
            tests = [test for test in session.tests if test.world is start]
            phases = [(test, phase.when, one) for test in tests for phase in test.phases for one in phase.ranks]
            for rank, place in enumerate(start.places):
                host = place.machine or session.host
                pid = "" if ready is None else f" (pid {ready.pids[rank]})"
                thread = self._thread(process, f"world {start.world} rank {rank} on {host}{pid}")
                self._slice(
                    thread, "start", (start.at, session.span.stop if ready is None else ready.at), about=start.about
                )
                for test, when, one in phases:
                    if one.rank == rank and one.start:
                        self._slice(thread, f"{when} {test.test}", (one.start, one.stop), ending=one.ending)
                        for collective in one.collectives:
                            self._add_collective(collective, thread)

    def _add_collective(self, collective: CollectiveCall, thread: _Track) -> None:
        fields = {"name": f"{collective.name} #{collective.number}", "args": {"group": collective.group}}
        if not collective.stop:
            self._add("i", thread, collective.issued, s="t", **fields)
            return
        # An asynchronous event may overlap others, and may last longer than the phase.
        number = next(self._numbers)
        for phase, at in (("b", collective.issued), ("e", collective.stop)):
            self._add(phase, thread, at, cat="collective", id=number, **fields)

    def add_devices(self, sessions: Sequence[Session]) -> None:
        """Add the tests on each device, which has a thread more for each further test that shares it."""
        indices = {lane: device.index for session in sessions for lane, device in session.devices.items()}
        runs = sorted((test for session in sessions for test in session.tests), key=lambda test: test.span.start)
        lanes = indices | {lane: len(indices) for test in runs for lane in test.lanes if lane not in indices}
        processes = {host: self._process(f"devices of {host}") for host in sorted({lane.host for lane in lanes})}
        for lane in sorted(lanes, key=lambda lane: (lane.host, lane.kind, lanes[lane], lane.name)):
            ends = {self._thread(processes[lane.host], lane.name): 0.0}
            for test in (test for test in runs if lane in test.lanes):
                free = (thread for thread, end in ends.items() if end <= test.span.start)
                thread = next(free, None) or self._thread(processes[lane.host], lane.name)
                ends[thread] = test.span.stop
                failure = "" if test.failure is None else test.failure.headline
                self._slice(thread, test.test, test.span, verdict=test.verdict, failure=failure)

    def _process(self, name: str) -> int:
        number = next(self._numbers)
        self.events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        return number

    def _thread(self, process: int, name: str) -> _Track:
        number = next(self._numbers)
        self.events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}})
        return _Track(process, number)

    def _slice(self, thread: _Track, name: str, span: tuple[float, float], /, **args: object) -> None:
        duration = max(0, self._time(span[1]) - self._time(span[0]))
        self._add("X", thread, span[0], name=name, dur=duration, args=args)

    def _add(self, phase: str, thread: _Track, at: float, **fields: Any) -> None:
        where = {"ph": phase, "pid": thread.process, "tid": thread.number, "ts": self._time(at)}
        self.events.append(where | fields)

    def _time(self, at: float) -> int:
        return round((at - self._start) * 1e6)
