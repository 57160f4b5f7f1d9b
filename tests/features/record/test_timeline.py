"""Tests of the timeline: critical path, rows of devices, utilisation, and other data made of a session's events."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import pytest

from pytest_accel import read_record
from pytest_accel.core.record_events import (
    SCHEMA,
    Event,
    PhaseReported,
    RankPlace,
    SessionStarted,
    TestStarted,
    WorldStarting,
)
from pytest_accel.features.record.record_file import RecordFile
from pytest_accel.features.record.timeline import (
    Session,
    critical_path,
    lane_rows,
    seconds_with_tests,
    sessions_of,
    utilisation,
)
from tests.large_record import write_record


def _session(path: Path, *events: Event) -> Session:
    """Return a session with `events`, which lasts from 0 to 10 seconds."""
    times = chain([0.0], repeat(10.0))
    file = RecordFile(str(path), clock=lambda: next(times))
    for event in (SessionStarted(SCHEMA, "5e55", "0.1.0", (), "/"), *events):
        file(event)
    file.close()
    (session,) = sessions_of([read_record(path)])
    return session


def _ran(test: str, start: float, stop: float, process: int = 1, world: int = 0) -> PhaseReported:
    """Return the report of a call that has passed."""
    return PhaseReported(test, "call", "passed", start, stop, process=process, world=world)


def test_a_test_whose_setup_was_its_last_phase_runs_until_the_record_ends(tmp_path: Path) -> None:
    session = _session(
        tmp_path / "record.jsonl",
        TestStarted("endless"),
        PhaseReported("endless", "setup", "passed", 1, 2),
        TestStarted("next"),
    )
    assert [(test.test, test.verdict, *test.span) for test in session.tests] == [
        ("endless", "unfinished", 1, 10),
        ("next", "unfinished", 10, 10),
    ]


def test_a_test_whose_worker_crashed_runs_until_the_crash(tmp_path: Path) -> None:
    """xdist's report of a crash names no worker, and has no times."""
    session = _session(
        tmp_path / "record.jsonl",
        TestStarted("in call", "gw0"),
        PhaseReported("in call", "setup", "passed", 1, 2, "gw0"),
        PhaseReported("in call", "???", "failed", 0, 0),
        TestStarted("in setup", "gw1"),
        PhaseReported("in setup", "???", "failed", 0, 0),
    )
    assert [(test.test, test.verdict, *test.span) for test in session.tests] == [
        ("in call", "failed", 1, 10),
        ("in setup", "failed", 10, 10),
    ]
    assert [(phase.when, phase.start, phase.stop) for phase in session.tests[0].phases] == [
        ("setup", 1, 2),
        ("???", 2, 10),
    ]


def test_the_critical_path_follows_processes_and_devices(tmp_path: Path) -> None:
    session = _session(
        tmp_path / "record.jsonl",
        WorldStarting(1, 1, "sim", (RankPlace(0, ("sim-0",)),)),
        WorldStarting(2, 2, "sim", (RankPlace(0, ("sim-1",)),)),
        _ran("first", 1, 4, process=1, world=1),
        _ran("other", 1, 5, process=2, world=2),
        _ran("second", 4, 6, process=3, world=1),
        _ran("third", 7, 9, process=3),
    )
    tests = [(step.test, *step.span) for step in critical_path(session) if step.kind == "test"]
    assert tests == [("first", 1, 4), ("second", 4, 6), ("third", 7, 9)]


def test_the_critical_path_has_no_cycle_of_tests_that_take_no_time(tmp_path: Path) -> None:
    session = _session(tmp_path / "record.jsonl", *(_ran(f"test_{number}", 5, 5) for number in range(3)))
    assert [(step.kind, *step.span) for step in critical_path(session)] == [("other", 0, 5), ("other", 5, 10)]


def test_seconds_with_tests_count_overlaps_once(tmp_path: Path) -> None:
    session = _session(tmp_path / "record.jsonl", _ran("a", 1, 4), _ran("b", 2, 3), _ran("c", 3, 5), _ran("d", 7, 8))
    assert seconds_with_tests(session.tests) == 5


def test_overlapping_tests_on_a_shared_device_have_different_rows(tmp_path: Path) -> None:
    shared = RankPlace(0, ("sim-0",), 0.5)
    session = _session(
        tmp_path / "record.jsonl",
        *(WorldStarting(number, number, "sim", (shared,)) for number in (1, 2)),
        _ran("first", 1, 4, world=1),
        _ran("beside", 2, 5, world=2),
        _ran("after", 4, 6, world=1),
    )
    ((lane, rows),) = lane_rows([session])
    assert lane.name == "sim-0"
    assert [[test.test for test in row] for row in rows] == [["first", "after"], ["beside"]]
    assert utilisation([session]) == [(1, 0.5), (2, 1.0), (4, 1.0), (5, 0.5), (6, 0.0)]


def test_only_the_longest_texts_of_a_page_are_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_details = pytest.importorskip("pytest_accel.features.record.page_details")
    failed = [
        PhaseReported(f"test_{size}", "call", "failed", 1, 2, failure="x" * size, output={"out": "y" * size})
        for size in (10, 100, 10_000, 20_000)
    ]
    session = _session(tmp_path / "record.jsonl", *failed)
    assert page_details.truncation(session.tests).longest is None
    monkeypatch.setattr(page_details, "TEXT_BUDGET", 4_000)
    shorten = page_details.truncation(session.tests)
    assert shorten.longest == (4_000 - 2 * 110) // 4
    for test in session.tests[:2]:
        assert shorten(test.phases[0].failure) == test.phases[0].failure
    assert "characters left out" in page_details.details(session.tests[-1], session, shorten)


def test_devices_are_in_the_order_of_their_indices(tmp_path: Path) -> None:
    """Sort by index, since the ids of the devices are random."""
    write_record(tmp_path / "record.jsonl", tests=30, devices=16)
    (session,) = sessions_of([read_record(tmp_path / "record.jsonl")])
    lanes = [lane for lane, _ in lane_rows([session])]
    assert [session.devices[lane].index for lane in lanes] == [*range(8), *range(8)]
    assert [lane.host for lane in lanes] == ["gpu-00.cluster"] * 8 + ["gpu-01.cluster"] * 8
