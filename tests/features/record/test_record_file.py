"""Tests of the file of ``--accel-record``: it is written event by event, and validated when it is read."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from pytest_accel import RecordError, read_record
from pytest_accel.core.record_events import (
    Event,
    PhaseReported,
    RankPhase,
    RankPlace,
    SessionFinished,
    SessionStarted,
    TestStarted,
    WorldStarting,
)
from pytest_accel.features.record.record_file import RecordFile

_START = SessionStarted(1, "5e55", "0.1.0", ("-q",), "/suite", shard=(1, 2))
_EVENTS: list[Event] = [
    _START,
    WorldStarting(3, 2, "2 on sim", (RankPlace(0, ("sim-0",), 0.5), RankPlace(1, ("sim-0", "sim-1")))),
    PhaseReported(
        *("test_it.py::test_\u2192", "call", "failed", 1.5, 2.0),
        ranks=(RankPhase(0, "passed", 1.5, 1.75), RankPhase(1, "died")),
        place=("test_it.py", 4),
        failed_ranks=(1,),
        output={"Captured stdout call": "a\nb"},
        peaks={"0": 1 << 40},
    ),
    SessionFinished(1),
]


def _first(**changes: object) -> str:
    """Return the first line of a record, with some fields changed."""
    fields = {"event": "SessionStarted", "at": 1, "host": "one", "pid": 1, "schema": 1, "session": "5e55"}
    return json.dumps(fields | {"version": "0.1.0", "command": [], "root": "/suite"} | changes) + "\n"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Provide the path of a complete record."""
    path = tmp_path / "folder" / "record.jsonl"
    file = RecordFile(str(path))
    for event in _EVENTS:
        file(event)
    file.close()
    assert file.error is not None
    return path


def test_events_are_read_back(record: Path) -> None:
    found = read_record(record)
    assert [one.event for one in found] == _EVENTS
    assert {(one.stamp.host, one.stamp.pid) for one in found} == {(os.uname().nodename, os.getpid())}
    times = [one.stamp.at for one in found]
    assert times == sorted(times)


def test_fields_with_default_values_are_left_out(record: Path) -> None:
    world = json.loads(record.read_text().splitlines()[1])
    assert world["ranks"] == [{"devices": ["sim-0"], "share": 0.5}, {"machine": 1, "devices": ["sim-0", "sim-1"]}]


def test_invalid_characters_are_replaced(tmp_path: Path) -> None:
    file = RecordFile(str(tmp_path / "record.jsonl"))
    file(_START)
    file(TestStarted("caf\udce9.py::test_\u2192"))
    assert [one.event for one in read_record(file.name)] == [_START, TestStarted("caf\\udce9.py::test_\u2192")]
    file.close()


def test_a_truncated_last_line_is_left_out(record: Path) -> None:
    text = record.read_bytes()
    record.write_bytes(text[:-10])
    assert [one.event for one in read_record(record)] == _EVENTS[:-1]


def test_events_and_fields_of_later_versions_are_left_out(record: Path) -> None:
    lines = record.read_text().splitlines(keepends=True)
    lines.insert(3, '{"event": "MoonRose", "at": 1, "host": "one", "pid": 1}\n')
    lines[4] = lines[4].replace("{", '{"phase": "new", ')
    record.write_text("".join(lines))
    assert [one.event for one in read_record(record)] == _EVENTS


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no events"),
        ("\n", "line 1: Input data was truncated"),
        ("[]\n", "line 1: Expected `object`, got `array`"),
        ('{"event": 1}\n', "line 1: Expected `str`, got `int` - at `$.event`"),
        ('{"document": "pytest-accel census"}\n', "line 1: Object missing required field"),
        ('{"event": "SessionStarted"}\n', "line 1: Object missing required field `at`"),
        (_first(schema=2), "line 1: the record has version 2; this pytest-accel reads version 1"),
        (_first(at="soon"), "line 1: Expected `float`, got `str` - at `$.at`"),
        (_first(at=True), "line 1: Expected `float`, got `bool` - at `$.at`"),
        (_first(at=float("nan")), "line 1: JSON is malformed: invalid character"),
        (_first(at=1e300), "line 1: Expected `float` <= 100000000000.0 - at `$.at`"),
        (_first(at=-1), "line 1: Expected `float` >= 0.0 - at `$.at`"),
        (_first(pid=1.5), "line 1: Expected `int`, got `float` - at `$.pid`"),
        (_first(command="-q"), "line 1: Expected `array`, got `str` - at `$.command`"),
        (_first(shard=[1, 2, 3]), "line 1: Expected `array` of length 2 - at `$.shard`"),
        (_first() + _first(event="TestStarted", test=None), "line 2: Expected `str`, got `null` - at `$.test`"),
        (_first(event="TestStarted", test="t"), "is not a record of --accel-record: its first event is TestStarted"),
        (_first() + "[" * 100_000 + "\n", "line 2: "),
        (_first(at=1) .replace("1", "1" + "0" * 400, 1), "line 1: "),
    ],
)  # fmt: skip
def test_an_invalid_record_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text(text)
    with pytest.raises(RecordError) as raised:
        read_record(path)
    assert str(path) in str(raised.value)
    assert error in str(raised.value)


def test_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none\.jsonl cannot be read: No such file"):
        read_record(tmp_path / "none.jsonl")


def test_a_record_cannot_be_written_to_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="is not a regular file"):
        RecordFile(str(tmp_path))


def test_an_old_record_is_replaced(record: Path) -> None:
    old_record = os.open(record, os.O_RDONLY)
    try:
        file = RecordFile(str(record))
        file(_START)
        file.close()
        assert len(read_record(record)) == 1
        # The old file is kept, so another session that still writes it does not damage the new one.
        assert b"SessionFinished" in os.read(old_record, 1 << 20)
    finally:
        os.close(old_record)


def test_writing_stops_with_an_error_if_the_disk_is_full(tmp_path: Path) -> None:
    file = RecordFile(str(tmp_path / "record.jsonl"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file(_START)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(file.name) + 20, limits[1]))
    try:
        file(TestStarted("test_it.py::test_one"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.error == f"{file.name} could not be written in full: no space left"
    file(TestStarted("test_it.py::test_two"))
    file.close()
    assert [one.event for one in read_record(file.name)] == [_START]


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    file = RecordFile(str(tmp_path / "record.jsonl"))
    file(_START)
    child = os.fork()
    if not child:
        file(TestStarted("test_it.py::test_in_child"))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    file(SessionFinished(0))
    file.close()
    assert [one.event for one in read_record(file.name)] == [_START, SessionFinished(0)]
