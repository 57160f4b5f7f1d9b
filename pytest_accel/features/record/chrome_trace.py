"""A trace of recorded sessions for ui.perfetto.dev and chrome://tracing.

In the JSON format of "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Its processes are here the devices of a machine, the workers of a session and the ranks of a session; its threads
are one device, one worker and one rank. Times are microseconds since the first session's start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count, zip_longest
from typing import Any

from pytest_accel.core.record_events import CollectiveCall
from pytest_accel.features.record.timeline import Period, Session, TestRun, Verdict, WorldLife, lane_rows, utilisation

_COLOURS: dict[Verdict, str] = {
    "passed": "good",
    "failed": "terrible",
    "error": "terrible",
    "unfinished": "terrible",
    "rerun": "bad",
    "skipped": "grey",
    "xfailed": "grey",
    "xpassed": "bad",
}
"""Names of colours that chrome://tracing has; Perfetto chooses its own."""


def trace_text(sessions: Sequence[Session]) -> str:
    """Return the trace of `sessions` as a JSON document."""
    trace = _Trace(min(session.span.start for session in sessions))
    for number, session in enumerate(sessions):
        of = f" of session {number}" if len(sessions) > 1 else ""
        trace.add_workers(session, f"workers{of} on {session.host}")
        trace.add_ranks(session, f"ranks{of}")
    trace.add_devices(sessions)
    sources = [{"session": one.started.session, "host": one.host, "start": one.span.start} for one in sessions]
    return json.dumps({"traceEvents": trace.events, "displayTimeUnit": "ms", "otherData": {"sessions": sources}})


class _Trace:
    """Collects the events of the document."""

    def __init__(self, start: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._start = start
        self._numbers = count(1)
        """Numbers of processes, threads and flows."""
        self._flows: dict[int, int] = {}
        """The number of the flow from the wait of a test to the test, by the `id()` of its :class:`TestRun`."""

    def add_workers(self, session: Session, name: str) -> None:
        """Add what the processes that run pytest did: phases of tests, waits and starts of ranks."""
        process = self._process(name)
        by_worker: dict[str, list[TestRun]] = {}
        for test in session.tests:
            by_worker.setdefault(test.worker, []).append(test)
        for worker, tests in sorted(by_worker.items()):
            thread = self._thread(process, worker or "pytest")
            phases = sorted((phase for test in tests for phase in test.phases), key=lambda phase: phase.start)
            for phase, following in zip_longest(phases, phases[1:]):
                # The duration of a phase is that in the ranks, which may have begun it before this process.
                stop = phase.stop if following is None else min(phase.stop, following.start)
                span = Period(phase.start, stop)
                self._slice(process, thread, f"{phase.when} {phase.test}", span, {"outcome": phase.outcome})
            if any(test.wait is not None for test in tests):
                waits = self._thread(process, f"{worker or 'pytest'}: waits and starts of ranks")
                for test in tests:
                    self._add_wait(test, process, waits)

    def _add_wait(self, test: TestRun, process: int, thread: int) -> None:
        if test.wait is None:
            return
        leased = test.wait.leased
        if leased is not None and test.waited > 0:
            span = Period(test.wait.requested, leased)
            self._slice(process, thread, "wait", span, {"test": test.test, "why": test.wait.why})
            self._flows[id(test)] = next(self._numbers)
            self._flow("s", test, process, thread, span.start)
        if leased is not None and test.wait.acquired is not None and test.world is not None:
            started = Period(leased, test.wait.acquired)
            self._slice(process, thread, "start of ranks", started, {"test": test.test, "world": test.world.number})

    def add_ranks(self, session: Session, name: str) -> None:
        """Add what the ranks of each world did: their start, and the phases of tests."""
        process = self._process(name)
        tests: dict[int, list[TestRun]] = {}
        for test in session.tests:
            if test.world is not None:
                tests.setdefault(test.world.number, []).append(test)
        for world in session.worlds:
            for rank in range(len(world.ranks)):
                thread = self._thread(process, _rank_name(session, world, rank))
                ready = world.ready if world.ready is not None else session.span.stop
                self._slice(process, thread, "start", Period(world.starting, ready), {"world": world.about})
                for test in tests.get(world.number, ()):
                    self._add_rank_phases(test, rank, process, thread)
                if world.gone is not None:
                    why = {"why": world.why_ended, "killed": world.killed}
                    self._add("i", process, thread, world.gone, name="end", s="t", args=why)

    def _add_rank_phases(self, test: TestRun, rank: int, process: int, thread: int) -> None:
        for phase in test.phases:
            for one in phase.ranks:
                if one.rank == rank and one.start:
                    span = Period(one.start, one.stop)
                    self._slice(process, thread, f"{phase.when} {test.test}", span, {"ending": one.ending})
                    for collective in one.collectives:
                        self._add_collective(collective, process, thread)

    def _add_collective(self, collective: CollectiveCall, process: int, thread: int) -> None:
        name, args = f"{collective.name} #{collective.number}", {"group": collective.group}
        if not collective.stop:
            self._add("i", process, thread, collective.issued, name=name, s="t", args=args)
            return
        # An asynchronous event may overlap others, and may last longer than the phase.
        number = next(self._numbers)
        for phase, at in (("b", collective.issued), ("e", collective.stop)):
            self._add(phase, process, thread, at, name=name, cat="collective", id=number, args=args)

    def add_devices(self, sessions: Sequence[Session]) -> None:
        """Add the tests on each device and CPU slot, and the number of devices in use."""
        processes: dict[str, int] = {}
        for lane, rows in lane_rows(sessions):
            process = processes.get(lane.host) or processes.setdefault(
                lane.host, self._process(f"devices of {lane.host}")
            )
            for row in rows:
                thread = self._thread(process, f"CPU slot {lane.name}" if lane.kind == "slot" else lane.name)
                for test in row:
                    self._slice(process, thread, test.test, test.span, _facts(test), _COLOURS[test.verdict])
                    self._flow("f", test, process, thread, test.span.start)
        if steps := utilisation(sessions):
            process = self._process("devices in use")
            for at, used in steps:
                self._add("C", process, 0, at, name="devices in use", args={"devices": used})

    def _process(self, name: str) -> int:
        number = next(self._numbers)
        self.events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        return number

    def _thread(self, process: int, name: str) -> int:
        number = next(self._numbers)
        self.events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}})
        return number

    def _slice(
        self, process: int, thread: int, name: str, span: Period, args: dict[str, Any], colour: str | None = None
    ) -> None:
        extra = {} if colour is None else {"cname": colour}
        duration = max(0, self._time(span.stop) - self._time(span.start))
        self._add("X", process, thread, span.start, name=name, dur=duration, args=args, **extra)

    def _flow(self, phase: str, test: TestRun, process: int, thread: int, at: float) -> None:
        """Add the begin ("s") or the end ("f") of the arrow from the wait of `test` to it; no-op without a wait."""
        if id(test) in self._flows:
            extra = {"bp": "e"} if phase == "f" else {}
            self._add(phase, process, thread, at, name="wait", cat="wait", id=self._flows[id(test)], **extra)

    def _add(self, phase: str, process: int, thread: int, at: float, **fields: Any) -> None:
        self.events.append({"ph": phase, "pid": process, "tid": thread, "ts": self._time(at), **fields})

    def _time(self, at: float) -> int:
        return round((at - self._start) * 1e6)


def _rank_name(session: Session, world: WorldLife, rank: int) -> str:
    host = session.machines.get(world.ranks[rank].machine, session.host)
    pid = f" (pid {world.pids[rank]})" if rank < len(world.pids) else ""
    return f"world {world.number} rank {rank} on {host}{pid}"


def _facts(test: TestRun) -> dict[str, object]:
    facts: dict[str, object] = {
        "verdict": test.verdict,
        "waited (s)": test.waited,
        "device seconds": test.device_seconds,
        "peak memory (bytes)": test.peak,
        "world": None if test.world is None else test.world.about,
        "failure": None if test.failure is None else test.failure.headline,
    }
    return {name: value for name, value in facts.items() if value is not None}
