"""The summary of one or several sessions on the page of a job of GitHub Actions.

Names of tests, reasons, messages and names of machines may contain anything. Each is shown on one line, without control
characters, and as the text that it is: it has no meaning in Markdown, HTML or a table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import groupby

from pytest_accel.core.terminal_lines import escaped
from pytest_accel.core.truncation import cut_end, ranks_text
from pytest_accel.core.units import count_text
from pytest_accel.features.record.timeline import Session, TestRun, Verdict, covered

LARGEST = 1 << 20
"""Bytes in UTF-8 that GitHub allows for the summaries of a step: more than all tables have with `_MOST_ROWS`."""
_FAILURES: tuple[Verdict, ...] = ("failed", "error", "unfinished")
_VERDICTS: tuple[Verdict, ...] = (*_FAILURES, "passed", "skipped", "xfailed", "xpassed", "rerun")
_MOST_ROWS = 50
_MOST = 10
"""Number of tests in the lists of the slowest tests and of the longest waits."""
_SHORTEST_WAIT = 0.1  # Seconds of a wait that is worth showing.
_LONGEST = 300  # Characters of a cell.
_ENTITIES = str.maketrans({one: f"&#{ord(one)};" for one in "&<>\"'`*_{}[]()|~#!$@^\\"})
"""The characters with a meaning in HTML, in Markdown or in GitHub's extensions of it."""
_Cell = str | int | float
"""A text, a number, or a number of seconds."""


def add_to_page(sessions: Sequence[Session], path: str) -> str | None:
    """Add the summary to the page of the job's step, the file `path`; return what went wrong, or None."""
    text = summary(sessions).encode()
    try:
        with open(path, "ab") as file:
            if file.tell() + len(text) > LARGEST:
                return f"the job summary {path} has no room for this session: GitHub allows 1 MiB for a step"
            file.write((b"\n\n" if file.tell() else b"") + text)  # A heading needs an empty line before it.
    except OSError as error:
        return f"the job summary {path} cannot be written: {error.strerror}"
    return None


def summary(sessions: Sequence[Session]) -> str:
    """Return the summary in GitHub's Markdown."""
    counts = Counter(test.verdict for session in sessions for test in session.tests)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict])
    seconds = max(one.span.stop for one in sessions) - min(one.span.start for one in sessions)
    hosts = ", ".join(map(_code, dict.fromkeys(session.host for session in sessions)))
    parts = [
        f"## pytest-accel: {shown or 'no tests'}",
        f"{count_text(len(sessions), 'session')} on {hosts}, {seconds:.1f} s",
    ]
    for session in sessions:  # Name each whose failure no test explains.
        if session.finished is None:
            parts.append(f"A session on {_code(session.host)} was killed: its record has no end.")
        elif session.finished.status not in (0, 5) and not _failures_of(session.tests):
            parts.append(f"A session on {_code(session.host)} ended with exit status {session.finished.status}.")
    return "\n\n".join([*parts, *_tables(sessions)]) + "\n"


def _tables(sessions: Sequence[Session]) -> Iterator[str]:
    tests = [test for session in sessions for test in session.tests]
    failures = [_failure_row(test) for test in _failures_of(tests)]
    used = ((one.test, one.device_seconds, one.span.seconds, one.waited) for one in tests if one.lanes)
    slowest = nlargest(_MOST, used, key=lambda row: row[1:3])
    waits = [(one.waited, one.wait.why) for one in tests if one.wait and one.wait.why and one.waited >= _SHORTEST_WAIT]
    skipped = [test for test in tests if test.verdict == "skipped"]
    missing = Counter(test.missing for test in skipped if test.missing)
    skips = Counter(test.skip for test in skipped if not test.missing)
    yield from _table("Devices", "machine | kind | number | names | in use (%)", _device_rows(sessions))
    yield from _table(f"Failures ({len(failures)})", "test | ranks | place | cause", failures)
    yield from _table("Slowest tests", "test | device-seconds | seconds | waited (s)", slowest)
    yield from _table("Longest waits", "waited (s) | wait", nlargest(_MOST, waits))
    yield from _table(f"Skipped for missing hardware ({missing.total()})", "cause | tests", missing.most_common())
    yield from _table(f"Skipped for other reasons ({skips.total()})", "reason | tests", skips.most_common())


def _table(title: str, columns: str, rows: Sequence[Sequence[_Cell]]) -> Iterator[str]:
    """Yield the parts of a table: nothing without rows."""
    if rows:
        shown = [[_cell(value) for value in row] for row in rows[:_MOST_ROWS]]
        lines = [[columns], [":---" if isinstance(cell, str) else "---:" for cell in rows[0]], *shown]
        yield f"### {title}"
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)
    if len(rows) > _MOST_ROWS:
        yield f"{len(rows) - _MOST_ROWS} more left out."


def _cell(value: _Cell) -> str:
    return _code(value) if isinstance(value, str) else f"{value:.1f}" if isinstance(value, float) else str(value)


def _code(text: str) -> str:
    """Return `text` on one line of limited length, with escapes in place of control characters and lone surrogates."""
    line = escaped(cut_end(" ".join(text.split()), _LONGEST))
    return f"<code>{line.translate(_ENTITIES)}</code>" if text else ""


def _failures_of(tests: Iterable[TestRun]) -> list[TestRun]:
    """Return the tests that failed or did not end, in the order in which they ended."""
    return sorted((test for test in tests if test.verdict in _FAILURES), key=lambda test: test.span.stop)


def _failure_row(test: TestRun) -> tuple[str, str, str, str]:
    """Return the test, the ranks that failed, the place and the cause."""
    if (phase := test.failure) is None:
        return test.test, "", "", "it was running when the session ended" if test.verdict == "unfinished" else ""
    ranks = ranks_text(phase.failed_ranks) if phase.failed_ranks else ""
    return test.test, ranks, "" if phase.place is None else f"{phase.place[0]}:{phase.place[1]}", phase.headline


def _device_rows(sessions: Sequence[Session]) -> list[tuple[_Cell, ...]]:
    """Return the devices of each machine by kind, and how much of the time in which tests ran they were in use."""
    names = {lane: device.name for session in sessions for lane, device in session.devices.items()}
    rows: list[tuple[_Cell, ...]] = []
    for (host, kind), group in groupby(sorted(names), key=lambda lane: (lane.host, lane.kind)):
        lanes = list(group)
        counts = Counter(names[lane] for lane in lanes)
        about = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
        there = (session for session in sessions if any(lane.host == host for lane in session.devices))
        tests = [test for session in there for test in session.tests]
        used = sum(test.span.seconds * share for test in tests for lane, share in test.lanes.items() if lane in lanes)
        available = len(lanes) * covered(test.span for test in tests)
        rows.append((host, kind, len(lanes), about, round(100 * used / available) if available else 0))
    return rows
