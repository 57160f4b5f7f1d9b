"""Tests of ``python -m pytest_accel trace``: the trace agrees with the record, and follows the trace event format."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel import read_record
from pytest_accel.__main__ import main
from pytest_accel.features.record.ci_summary import summary
from pytest_accel.features.record.timeline import Session, sessions_of
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


@needs_torch(2, 8)
def test_a_trace_has_the_devices_collectives_and_waits_of_a_session(suite: Suite) -> None:
    suite.write("test_it.py", _TESTS)
    suite.run("--accel-record=record.jsonl", "-n2")
    assert main(["trace", str(suite.path / "record.jsonl"), "-o", str(suite.path / "out" / "trace.json")]) == 0
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


@needs_torch(2, 8)
def test_a_trace_names_the_process_group_of_a_collective(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2, kind="cpu")
        def test_groups():
            import torch
            import torch.distributed as dist

            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=group)
            dist.all_reduce(torch.ones(1))
            print(f"new group: {group.group_name}.")
            dist.destroy_process_group(group)
        """,
    )
    run = suite.run("--accel-record=record.jsonl", "-rP")
    assert main(["trace", str(suite.path / "record.jsonl"), "-o", str(suite.path / "trace.json")]) == 0
    (name,) = {*re.findall(r"^new group: (.*)\.$", run.text, re.MULTILINE)}
    events = _events(suite.path / "trace.json")["i"]
    groups = Counter(event["args"]["group"] for event in events if "group" in event["args"])
    assert groups == {"default_pg": 2, name: 2}


def _lanes(session: Session, test: str) -> list[Any]:
    """Return the devices and CPU slots that the runs of `test` used."""
    return [lane for run in session.tests if run.test == test for lane, _ in run.lanes]


def test_a_trace_and_a_summary_can_have_several_sessions(suite: Suite, capfd: pytest.CaptureFixture[str]) -> None:
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

    expected = summary([first, second])
    assert expected.startswith("## pytest-accel: 1 failed, 10 passed\n\n2 sessions on ")
    output = suite.path / "out" / "summary.md"
    capfd.readouterr()
    assert main(["summary", *records]) == 0
    assert capfd.readouterr().out == expected
    assert main(["summary", *records, "-o", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == expected
    with pytest.raises(SystemExit):
        main(["summary", str(suite.path / "test_it.py")])


def test_without_a_temporary_folder_the_error_names_the_option_that_was_given(suite: Suite) -> None:
    suite.write(
        "no_folder.py",
        """
        import tempfile


        def fail(*args, **kwargs):
            raise FileNotFoundError(2, "No usable temporary directory found")


        tempfile.TemporaryFile = fail
        """,
    )
    suite.write("test_it.py", "def test_plain(): pass\n")
    run = suite.run("-p", "no_folder", "--accel-report=report.html")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        "ERROR: --accel-report: the temporary record of the session cannot be written: "
        "No usable temporary directory found"
    ) in run.errors
