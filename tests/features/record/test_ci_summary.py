"""Tests of the summary for CI systems: its tables, its size limit, escaped text, and what each CI system receives."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING

import pytest

from pytest_accel.core.record_events import (
    DeviceFound,
    Event,
    PhaseReported,
    PoolOpened,
    RankPlace,
    RequestEnded,
    RequestWaits,
    SessionFinished,
    SessionStarted,
    Stamp,
    TestStarted,
    WorldAcquired,
    WorldRequested,
    WorldStarting,
)
from pytest_accel.features.record import ci_summary
from pytest_accel.features.record.ci_summary import LARGEST, plain_summary, printable, summary
from pytest_accel.features.record.record_file import Recorded
from pytest_accel.features.record.timeline import Session, sessions_of

if TYPE_CHECKING:
    from pathlib import Path

_START = SessionStarted(1, "5e55", "0.1.0", (), "/suite")
_EVIL = "a\n</td> | <b> `c` *d* [e](f) ::error:: @g #1 \x1b[0Ksection_end:1:s\r \udce9 \u202e"


def _session(*events: tuple[float, Event], host: str = "one") -> Session:
    """Return a session on `host` with the given times and events."""
    (session,) = sessions_of([[Recorded(event, Stamp(at, host, 1)) for at, event in [(0.0, _START), *events]]])
    return session


def _skip(test: str, *, reason: str = "", missing: str | None = None) -> tuple[float, Event]:
    return 1.0, PhaseReported(test, "setup", "skipped", 1.0, 1.0, skip=reason, missing=missing)


def _fail(test: str, headline: str, *, at: float = 1.0) -> tuple[float, Event]:
    return at, PhaseReported(test, "call", "failed", at, at, headline=headline)


def _run(test: str, world: int, start: float, stop: float) -> list[tuple[float, Event]]:
    """Return the events of a test that passes. `world` is 0 if it runs in none."""
    return [
        (start, PhaseReported(test, "setup", "passed", start, start, world=world)),
        (stop, PhaseReported(test, "call", "passed", start, stop, world=world)),
        (stop, PhaseReported(test, "teardown", "passed", stop, stop, world=world)),
    ]


def _table(text: str, title: str) -> list[list[str]]:
    """Return the cells of a table as a browser shows them."""
    found = re.search(rf"^### {re.escape(title)}.*\n\n\| .*\n\| :?-.*\n((?:\| .*\n)+)", text, re.MULTILINE)
    assert found is not None, text
    rows = [line[2:-2].split(" | ") for line in found[1].splitlines()]
    return [[html.unescape(re.sub("</?code>", "", cell)) for cell in row] for row in rows]


def test_summary_has_devices_slowest_tests_and_longest_waits() -> None:
    session = _session(
        (0.0, PoolOpened(4, "cuda")),
        (0.0, DeviceFound("a", "cuda", 0, "L4")),
        (0.0, DeviceFound("b", "cuda", 1, "L4")),
        (5.0, WorldRequested(1, "test_one", "1 on cuda")),
        (10.0, WorldStarting(2, 1, "1 on cuda", (RankPlace(0, ("a",)),))),
        (10.0, WorldAcquired(2, 1)),
        *_run("test_one", 2, 10.0, 20.0),
        (20.0, WorldRequested(3, "test_two", "2 on cuda")),
        (20.0, RequestWaits(3, "test_two waits for 2 cuda devices")),
        (23.0, WorldStarting(4, 3, "2 on cuda", (RankPlace(0, ("a", "b")),))),
        (23.0, WorldAcquired(4, 3)),
        *_run("test_two", 4, 23.0, 33.0),
        (32.0, TestStarted("test_in_vain")),
        (33.0, WorldRequested(5, "test_in_vain", "2 on cuda")),
        (33.0, RequestWaits(5, "test_in_vain waits for 2 cuda devices")),
        (40.0, RequestEnded(5, "no devices came free")),
        _fail("test_in_vain", "no devices came free", at=40.0),
        *_run("test_unmarked", 0, 40.0, 55.0),
        *_run("test_beside_it", 0, 45.0, 60.0),
        (60.0, SessionFinished(1)),
    )
    text = summary([session])
    assert text.startswith("## pytest-accel: 1 failed, 4 passed\n\n1 session on <code>one</code>, 60.0 s\n")
    # Tests ran in 10 + 10 + 20 of the 60 seconds; one device was in use for 20 of them and the other for 10.
    assert _table(text, "Devices") == [["one", "cuda", "2", "2 x L4", "38"]]
    assert _table(text, "Slowest tests by device-seconds") == [
        ["test_two", "20.0", "10.0", "2", "3.0"],
        ["test_one", "10.0", "10.0", "1", "5.0"],
    ]
    assert _table(text, "Longest waits") == [
        ["7.0", "test_in_vain waits for 2 cuda devices"],
        ["3.0", "test_two waits for 2 cuda devices"],
    ]


def test_failures_are_sorted_by_time() -> None:
    session = _session(_fail("test_b", "later", at=3.0), _fail("test_a", "first", at=2.0), (4.0, SessionFinished(1)))
    assert [row[-1] for row in _table(summary([session]), "Failures (2)")] == ["first", "later"]


def test_skips_for_missing_hardware_come_before_other_skips() -> None:
    session = _session(
        *(_skip(f"test_{number}", reason="not today") for number in range(3)),
        *(_skip(f"test_many_{number}", reason="needs 8", missing="needs 8 devices") for number in range(2)),
        (2.0, SessionFinished(0)),
    )
    text = summary([session])
    assert _table(text, "Skipped for missing hardware (2)") == [["needs 8 devices", "2"]]
    assert _table(text, "Skipped for other reasons (3)") == [["not today", "3"]]
    assert text.index("missing hardware") < text.index("other reasons")


def test_summary_names_sessions_that_were_killed_or_failed() -> None:
    killed = _session((1.0, TestStarted("test_it")))
    refused = _session((1.0, SessionFinished(4)), host="two")
    text = summary([killed, refused])
    assert "A session on <code>one</code> was killed" in text
    assert "A session on <code>two</code> ended with exit status 4" in text
    assert _table(text, "Failures (1)") == [["test_it", "", "", "it was running when the session ended"]]


def test_text_cannot_inject_markup_or_commands() -> None:
    session = _session(
        _fail(f"test_it[{_EVIL}]", _EVIL), _skip("test_skip", reason=_EVIL), (1.0, SessionFinished(1)), host=_EVIL
    )
    text = summary([session], job=_EVIL)
    expected = r"a </td> | <b> `c` *d* [e](f) ::error:: @g #1 \x1b[0Ksection_end:1:s \udce9 \u202e"
    assert printable(_EVIL) == expected
    assert _table(text, "Failures (1)") == [[f"test_it[{expected}]", "", "", expected]]
    assert _table(text, "Skipped for other reasons (1)") == [[expected, "1"]]
    assert not set(re.sub("</?code>|&#[0-9]+;", "", text)) & set("<>&`*[]@\x1b\r\u202e")
    assert all(line.startswith(("##", "| ", "1 session on <code>")) for line in text.splitlines() if line)
    plain = plain_summary([session])
    assert f"  {expected}      1" in plain.splitlines()
    assert "\x1b" not in plain


@pytest.fixture(scope="module")
def large() -> Session:
    """Provide a session with many more failures and causes of skips than fit into a summary."""
    return _session(
        *(_fail(f"test_é.py::test_{number}", f"{number} é" * 50) for number in range(10_000)),
        *(_skip(f"test_it.py::test_{number}", reason=f"reason {number} " * 20) for number in range(10_000)),
        *(_skip(f"test_x.py::test_{number}", reason="x", missing=f"{number} gpus " * 20) for number in range(10_000)),
        (2.0, SessionFinished(1)),
    )


@pytest.mark.parametrize("room", [LARGEST, LARGEST // 10, 6_000])
def test_summary_is_truncated_to_the_size_limit(large: Session, room: int) -> None:
    text = summary([large], room=room)
    assert room // 2 < len(text.encode()) <= room
    left_out = [int(number) for number in re.findall(r"^(\d+) more left out", text, re.MULTILINE)]
    titles = ("Failures", "Skipped for missing hardware", "Skipped for other reasons")
    rows = [len(_table(text, f"{title} (10000)")) for title in titles]
    assert [shown + omitted for shown, omitted in zip(rows, left_out, strict=True)] == [10_000] * 3


def test_summary_without_room_for_tables_has_no_rows_or_is_empty(large: Session) -> None:
    text = summary([large], room=100)
    assert text == "## pytest-accel: 10000 failed, 20000 skipped\n\n1 session on <code>one</code>, 2.0 s\n"
    assert summary([large], room=len(text)) == text
    assert summary([large], room=len(text) - 1) == ""


def test_step_summary_file_is_not_larger_than_the_limit(large: Session, tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_bytes(b"x" * (LARGEST // 2))
    assert ci_summary.append_summary([large], str(path)) is None
    size = path.stat().st_size
    assert LARGEST * 0.75 < size <= LARGEST
    assert path.read_bytes()[LARGEST // 2 :].startswith(b"\n\n## pytest-accel: ")
    path.write_bytes(b"x" * (LARGEST - 10))
    assert "has no room" in (ci_summary.append_summary([large], str(path)) or "")
    assert path.stat().st_size == LARGEST - 10


def test_annotate_build_reports_an_agent_that_times_out(tmp_path: Path) -> None:
    agent = tmp_path / "buildkite-agent"
    agent.write_text("#!/bin/sh\nexec sleep 1000\n")
    agent.chmod(0o755)
    environment = {"BUILDKITE": "true", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    problem = ci_summary.annotate_build([_session((1.0, SessionFinished(0)))], environment, timeout=0.1)
    assert problem == "buildkite-agent annotate: took longer than 0.1 s"


def test_error_lines_have_only_places_in_the_repository(tmp_path: Path) -> None:
    failure = PhaseReported(
        *("test_it.py::test_it[a,b]", "call", "failed", 1.0, 1.0),
        file="test_it.py",
        line=7,
        place=("/usr/lib/python/x.py", 9),
        headline="100%: no",
    )
    events: list[Event] = [SessionStarted(1, "", "", (), str(tmp_path / "sub")), failure, SessionFinished(1)]
    (session,) = sessions_of([[Recorded(event, Stamp(1.0, "one", 1)) for event in events]])
    line = "::error file=sub/test_it.py,line=7,title=test_it.py%3A%3Atest_it[a%2Cb]::100%25: no"
    assert list(ci_summary.error_lines([session], str(tmp_path))) == [line]
    assert list(ci_summary.error_lines([session], None)) == [line.replace("sub/", "")]
    assert list(ci_summary.error_lines([session], str(tmp_path / "other"))) == [
        "::error title=test_it.py%3A%3Atest_it[a%2Cb]::100%25: no"
    ]


def test_the_first_ten_failures_have_error_lines() -> None:
    session = _session(*(_fail(f"test_{number}", "no", at=number) for number in range(12)), (20.0, SessionFinished(1)))
    assert list(ci_summary.error_lines([session], None)) == [f"::error title=test_{number}::no" for number in range(10)]
