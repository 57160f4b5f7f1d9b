"""Tests of ``--accel-trace``: the trace agrees with the record, and follows the trace event format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_accel import read_record
from pytest_accel.__main__ import main
from pytest_accel.record.timeline import Session, sessions_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.features.conftest import Suite

_TESTS = """
    import os

    import pytest


    @pytest.mark.distributed(2)
    @pytest.mark.parametrize("number", range(3))
    def test_ranks(number):
        import torch
        import torch.distributed as dist

        dist.barrier()
        dist.all_reduce(torch.ones(1))


    @pytest.mark.devices(4)
    @pytest.mark.parametrize("number", range(3))
    def test_all_devices(number):
        pass


    @pytest.mark.devices(share=0.25)
    @pytest.mark.parametrize("number", range(3))
    def test_share(number):
        pass


    @pytest.mark.distributed(2)
    def test_dies(rank):
        if rank:
            os._exit(0)


    def test_plain():
        pass
"""


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


def _check_threads(events: dict[str, list[dict[str, Any]]]) -> None:
    """Check that each slice is of a thread with a name, and that the slices of one thread do not overlap."""
    by_thread = defaultdict(list)
    for event in events["X"]:
        by_thread[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert by_thread.keys() <= _names(events, "thread_name").keys()
    for spans in by_thread.values():
        for (start, stop), (following, _) in pairwise(sorted(spans)):
            assert 0 <= start <= stop <= following


def test_a_trace_has_the_devices_collectives_and_waits_of_a_session(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run("--accel-trace=out/trace.json", "--accel-record=record.jsonl", "-n2")
    assert f"accel: trace of the session: {suite.path}/out/trace.json" in run.text
    (session,) = sessions_of([read_record(suite.path / "record.jsonl")])
    events = _events(suite.path / "out" / "trace.json")
    _check_threads(events)
    processes, threads = _names(events, "process_name"), _names(events, "thread_name")

    on_devices = [event for event in events["X"] if processes[event["pid"]] == f"devices of {session.host}"]
    by_test: dict[str, list[str]] = defaultdict(list)
    for event in on_devices:
        by_test[event["name"]].append(threads[event["tid"]])
    assert by_test == {
        test.test: [lane.name for lane in sorted(_lanes(session, test.test))] for test in session.tests if test.lanes
    }
    verdicts = {event["name"]: event["args"]["verdict"] for event in on_devices}
    assert verdicts["test_it.py::test_dies"] == "failed"
    calls = {event["name"] for event in events["X"] if threads[event["tid"]] in ("gw0", "gw1")}
    assert {f"call {test.test}" for test in session.tests} <= calls
    assert any(name.startswith("world ") and " rank 1 on " in name for name in threads.values())

    collectives = Counter(event["name"].partition(" #")[0] for event in events["i"] if "group" in event["args"])
    assert collectives == {"gloo:barrier": 6, "gloo:all_reduce": 6}

    waited = {test.test for test in session.tests if test.waited > 0}
    begins, ends = ({event["id"]: event for event in events[phase]} for phase in "sf")
    assert len(begins) == len(waited)
    assert ends.keys() == begins.keys()
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)
    assert max(event["args"]["devices"] for event in events["C"]) == 4


def _lanes(session: Session, test: str) -> list[Any]:
    """Return the devices and CPU slots that the runs of `test` used."""
    return [lane for run in session.tests if run.test == test for lane, _ in run.lanes]


def test_one_trace_can_have_several_sessions(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    for shard in (1, 2):
        suite.run(f"--accel-record=record-{shard}.jsonl", f"--accel-shard={shard}/2")
    records = [str(suite.path / f"record-{shard}.jsonl") for shard in (1, 2)]
    trace = suite.path / "trace.json"
    assert main(["trace", *records, "-o", str(trace)]) == 0
    events = _events(trace)
    _check_threads(events)
    first, second = sessions_of(map(read_record, records))
    names = set(_names(events, "process_name").values())
    assert {f"workers of session {number} on {first.host}" for number in (0, 1)} <= names
    on_devices = {event["name"] for event in events["X"] if "verdict" in event["args"]}
    assert on_devices == {test.test for session in (first, second) for test in session.tests if test.lanes}
