"""Tests of ``--accel-record``: the record has a session's events, agrees with pytest's report, and is validated."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from pytest_accel import RecordError, read_record
from pytest_accel.features.record.record_file import Event, RecordFile
from pytest_accel.features.record.timeline import sessions_of
from tests.features.conftest import Suite
from tests.features.record.conftest import VERDICTS, Recorded, ran, write_events


def _of_kind(record: list[Event], name: str) -> list[Event]:
    return [event for event in record if event.event == name]


@pytest.mark.parametrize("name", ["no_xdist", "two_workers"])
def test_the_record_agrees_with_the_report_of_pytest(request: pytest.FixtureRequest, name: str) -> None:
    recorded: Recorded = request.getfixturevalue(name)
    record, tests = recorded.record, recorded.tests
    assert f"accel: record of the session: {recorded.folder / 'record.jsonl'}" in recorded.text
    assert {name: test.verdict for name, test in tests.items()} == VERDICTS
    assert (record[0].event, record[-1].event, record[-1].status) == ("SessionStarted", "SessionFinished", 1)
    assert {event.test: event.worker for event in _of_kind(record, "TestStarted")} == {
        test.test: test.worker for test in tests.values()
    }
    verdicts = Counter(test.verdict for test in tests.values())
    assert [int(recorded.junit.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")] == [
        len(tests),
        verdicts["failed"],
        verdicts["error"],
        verdicts["skipped"] + verdicts["xfailed"],
    ]
    for case in recorded.junit.iter("testcase"):
        properties = {one.get("name"): one.get("value") for one in case.iter("property")}
        lanes = [lane.name for lane in tests[case.get("name", "")].lanes]
        assert properties.get("accel_devices", "") == ",".join(lanes)
        assert float(properties.get("accel_wait") or 0) == pytest.approx(tests[case.get("name", "")].waited, abs=1.0)
    for test in tests.values():
        assert record[0].at < test.span.start <= test.span.stop < record[-1].at
    requests = _of_kind(record, "WorldRequested")
    answers = [*_of_kind(record, "WorldAcquired"), *_of_kind(record, "RequestEnded")]
    assert sorted(event.request for event in answers) == sorted(one.request for one in requests)


def test_the_record_has_failures_output_and_worlds(no_xdist: Recorded) -> None:
    record, tests = no_xdist.record, no_xdist.tests
    failure = tests["test_one_rank_fails"].failure
    assert failure is not None
    assert (failure.failed_ranks, failure.place) == ((1,), ("sub/test_it.py", no_xdist.line("assert rank == 0")))
    assert "assert 1 == 0" in failure.headline
    assert "assert rank == 0" in failure.failure
    assert failure.output["Captured stdout call [rank 1]"] == "hello from 1\n"
    death = tests["test_one_rank_ends"].failure
    assert death is not None
    assert [rank.ending for rank in death.ranks] == ["passed", "died"]
    assert all(0 < rank.start <= rank.stop <= death.at for rank in death.ranks)
    assert tests["test_errs"].failure is not None
    assert tests["test_xfails"].phases[1].xfail == "known"
    assert tests["test_skips"].skip == "of its own accord"
    assert tests["test_too_many"].missing == "needs 9 sim devices; there are 4: 4 x sim"
    assert tests["test_ranks[0]"].phases[-1].output == {}

    world = tests["test_one_rank_ends"].world
    assert world is not None
    (ending,) = (event for event in _of_kind(record, "WorldEnding") if event.world == world.world)
    assert "exited with status 3" in ending.why
    assert ending.killed
    names = ("WorldStarting", "WorldReady", "WorldEnding", "WorldGone")
    numbers = [[event.world for event in _of_kind(record, name)] for name in names]
    assert all(set(found) == set(numbers[0]) for found in numbers)


def test_the_record_of_two_workers_has_devices(two_workers: Recorded) -> None:
    record, tests = two_workers.record, two_workers.tests
    assert [(event.kind, event.slots > 0) for event in _of_kind(record, "PoolOpened")] == [("sim", True)]
    assert [event.device for event in _of_kind(record, "DeviceFound")] == [f"sim-{number}" for number in range(4)]
    assert set(tests["test_all_devices"].lanes.values()) == {1.0}
    assert list(tests["test_share[0]"].lanes.values()) == [0.25]
    assert tests["test_plain"].lanes == tests["test_too_many"].lanes == tests["test_on_cpu"].lanes == {}
    assert {test.worker for test in tests.values()} == {"gw0", "gw1"}


def test_the_record_has_each_run_of_a_test(tmp_path: Path) -> None:
    runs = [((0.5, "TestStarted", {"test": "test_it"}), *ran("test_it", outcome)) for outcome in ("rerun", "passed")]
    path = write_events(tmp_path / "record.jsonl", *chain.from_iterable(runs))
    assert [test.verdict for test in sessions_of([read_record(path)])[0].tests] == ["rerun", "passed"]


def test_a_path_that_cannot_be_written_is_a_usage_error(suite: Suite) -> None:
    path = suite.write("test_it.py", "def test_it(): pass\n")
    lost = "test_it.py: it exists and has other content, which would be lost; name a new"
    for option, value, text in (
        ("--accel-record", "test_it.py/a", f"--accel-record: {suite.path}/test_it.py/a cannot be written: File exists"),
        *((option, "test_it.py", f"ERROR: {option} {lost}") for option in ("--accel-record", "--accel-report")),
    ):
        run = suite.run(option, value)
        assert run.ret == pytest.ExitCode.USAGE_ERROR
        assert text in run.errors
        assert not run.results
        assert "Traceback" not in run.text + run.errors
    assert path.read_text() == "def test_it(): pass\n"


_START = {"schema": 2, "session": "5e55", "version": "0.1.0", "command": ["-q"], "root": "/suite"}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[RecordFile]:
    """Provide the file of a record with its first event."""
    file = RecordFile(str(tmp_path / "folder" / "record.jsonl"))
    file("SessionStarted", **_START)
    yield file
    file.close()


def test_what_cannot_be_encoded_or_has_been_cut_off_or_is_new_does_not_spoil_a_record(file: RecordFile) -> None:
    file("TestStarted", test="caf\udce9.py::test_\u2192")
    file("MoonRose", phase="new")
    file("SessionFinished", status=1)
    child = os.fork()
    if not child:
        file("TestStarted", test="in a copy of the process")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = read_record(file.name)
    assert [(event.event, event.test, event.status) for event in found] == [
        ("SessionStarted", "", 0),
        ("TestStarted", "caf?.py::test_\u2192", 0),
        ("MoonRose", "", 0),
        ("SessionFinished", "", 1),
    ]
    assert {(event.host, event.pid) for event in found} == {(os.uname().nodename, os.getpid())}
    os.truncate(file.name, os.path.getsize(file.name) - 10)
    assert read_record(file.name) == found[:-1]
    assert file.read() == found[:-1]
    # The old file is kept for a process that still writes it.
    again = RecordFile(file.name)
    file("SessionFinished", status=1)
    with pytest.raises(RecordError, match="has no events"):
        again.read()
    again.close()


def test_a_session_says_once_that_its_record_is_not_complete(suite: Suite) -> None:
    suite.without_torch()
    limit = 16_000
    suite.write(
        "test_it.py",
        f"""
        import resource

        import pytest

        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


        @pytest.mark.parametrize("number", range({limit // 8}))
        def test_left_out(number):
            pass


        def test_plain():
            pass
        """,
    )
    run = suite.run("-k", "plain", "--accel-record=r.jsonl")
    run.expect({"test_plain": "PASSED"})
    said = [line for line in (run.text + run.errors).splitlines() if "r.jsonl" in line]
    assert said == [f"accel: {suite.path / 'r.jsonl'} is not complete: File too large"]
    assert read_record(suite.path / "r.jsonl")[0].event == "SessionStarted"
    assert run.ret == 1


def _first(**changes: object) -> str:
    """Return the first line of a record, with some fields changed."""
    fields = {"event": "SessionStarted", "at": 1, "host": "one", "pid": 1}
    return json.dumps(fields | _START | changes) + "\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"document": "another"}\n', "line 1: Object missing required field"),
        (_first(schema=1), "has version 1; this pytest-accel reads version 2"),
        (_first(event="TestStarted", test="t"), "is not a record of --accel-record: its first event is TestStarted"),
        (_first() + "[" * 100_000 + "\n", "line 2: "),
    ],
)  # fmt: skip
def test_an_invalid_record_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "record.jsonl"
    with pytest.raises(RecordError, match=r"record\.jsonl cannot be read: No such file"):
        read_record(path)
    path.write_text(text)
    with pytest.raises(RecordError) as raised:
        read_record(path)
    assert str(path) in str(raised.value)
    assert error in str(raised.value)
