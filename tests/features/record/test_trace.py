"""Tests of ``python -m pytest_accel trace``: the trace agrees with the record, and follows the trace event format."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pytest_accel import read_record
from pytest_accel.__main__ import main
from pytest_accel.features.record.timeline import sessions_of
from tests.torch_release import needs_torch

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
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=group)


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


@needs_torch(2, 8)
def test_a_trace_has_the_devices_workers_and_ranks_of_several_sessions(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    records = [str(suite.path / f"record-{shard}.jsonl") for shard in (1, 2)]
    for shard, record in enumerate(records, 1):
        suite.run(f"--accel-record={record}", f"--accel-shard={shard}/2", "-n2")
    assert main(["trace", *records, "-o", str(suite.path / "out" / "trace.json")]) == 0
    sessions = sessions_of(map(read_record, records))
    tests = [test for session in sessions for test in session.tests]
    events = _events(suite.path / "out" / "trace.json")
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
    assert by_test == {test.test: [lane.name for lane in sorted(test.lanes)] for test in tests if test.lanes}
    verdicts = {event["name"]: event["args"]["verdict"] for event in on_devices}
    assert verdicts["test_it.py::test_dies"] == "failed"
    calls = {event["name"] for event in events["X"] if threads[event["tid"]] in ("gw0", "gw1")}
    assert {f"call {test.test}" for test in tests} <= calls
    waits = Counter(event["args"]["test"] for event in events["X"] if event["name"] == "wait")
    assert waits == Counter(test.test for test in tests if test.waited > 0)
    starts = Counter(event["args"]["test"] for event in events["X"] if event["name"] == "start of ranks")
    assert starts == Counter(test.test for test in tests if test.wait is not None and test.wait.starts_world)
    assert any(name.startswith("world ") and " rank 1 on " in name for name in threads.values())
    collectives = Counter(event["name"].partition(" #")[0] for event in events["i"] if "group" in event["args"])
    assert collectives == {"gloo:barrier": 6, "gloo:all_reduce": 6}
    assert len({event["args"]["group"] for event in events["i"] if "all_reduce" in event["name"]}) > 0
    assert {f"workers of session {number} on {sessions[0].host}" for number in (0, 1)} <= set(processes.values())
