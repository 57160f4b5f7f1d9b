"""Tests of ``python -m pytest_accel trace``: the trace agrees with the record, and follows the trace event format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytest_accel import read_record
from pytest_accel.__main__ import main
from pytest_accel.features.record.timeline import sessions_of
from tests.features.record.conftest import Recorded
from tests.torch_release import needs_torch


def _events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of the trace `path` by their phase (``ph``)."""
    events = defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        events[event["ph"]].append(event)
    return events


def _names(events: dict[str, list[dict[str, Any]]], kind: str) -> dict[int, str]:
    """Return the names of processes by their id, or those of threads, as `kind` says."""
    key = {"process_name": "pid", "thread_name": "tid"}[kind]
    return {event[key]: event["args"]["name"] for event in events["M"] if event["name"] == kind}


@needs_torch(2, 8)
def test_a_trace_has_the_devices_workers_and_ranks_of_several_sessions(
    no_xdist: Recorded, two_workers: Recorded, tmp_path: Path
) -> None:
    records = [str(one.folder / "record.jsonl") for one in (no_xdist, two_workers)]
    assert main(["trace", *records, "-o", str(tmp_path / "out" / "trace.json")]) == 0
    sessions = sessions_of(map(read_record, records))
    tests = [test for session in sessions for test in session.tests]
    events = _events(tmp_path / "out" / "trace.json")
    processes, threads = _names(events, "process_name"), _names(events, "thread_name")

    by_thread = defaultdict(list)
    for event in events["X"]:
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert by_thread.keys() <= threads.keys()
    for spans in by_thread.values():
        for (start, stop), (following, _) in pairwise(sorted(spans)):
            assert 0 <= start <= stop <= following

    on_devices = [event for event in events["X"] if processes[event["pid"]] == f"devices of {sessions[0].host}"]
    by_test: dict[str, list[str]] = defaultdict(list)
    for event in on_devices:
        by_test[event["name"]].append(threads[event["tid"]])
    expected: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        expected[test.test] += [lane.name for lane in test.lanes]
    assert {name: sorted(found) for name, found in by_test.items()} == {
        name: sorted(lanes) for name, lanes in expected.items() if lanes
    }
    verdicts = {event["name"]: event["args"]["verdict"] for event in on_devices}
    assert verdicts["sub/test_it.py::test_one_rank_ends"] == "failed"
    phases = {event["name"] for event in events["X"] if threads[event["tid"]] in ("gw0", "gw1", "pytest")}
    assert {f"{phase.when} {test.test}" for test in tests for phase in test.phases} <= phases
    waits = Counter(event["args"]["test"] for event in events["X"] if event["name"] == "wait")
    assert waits == Counter(test.test for test in tests if test.waited > 0)
    assert any(name.startswith("world ") and " rank 1 on " in name for name in threads.values())
    collectives = Counter(event["name"].partition(" #")[0] for event in events["i"] if "group" in event["args"])
    assert collectives == {"gloo:barrier": 16, "gloo:all_reduce": 12}
    assert {f"workers of session {number} on {sessions[0].host}" for number in (0, 1)} <= set(processes.values())
