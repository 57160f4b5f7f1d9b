"""The summary of sessions in HTML: tables for the page of a job of GitHub Actions, and a page with these and all tests.

GitHub takes Markdown. It shows HTML in it as it is, up to an empty line; the summary has one at its end only. Names of
tests, reasons, messages and names of machines may contain anything. Each is shown as code, on one line without control
characters.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from heapq import nlargest
from html import escape
from itertools import groupby

from pytest_accel.core.truncation import cut_end, ranks_text
from pytest_accel.core.units import format_memory
from pytest_accel.features.record.record_file import Event
from pytest_accel.features.record.timeline import Lane, Session, TestRun, Verdict, covered

LARGEST = 1 << 20
"""Bytes in UTF-8 that GitHub allows for the summaries of a step: more than all tables have with `_MOST_ROWS`."""
_FAILURES: tuple[Verdict, ...] = ("failed", "error", "unfinished")
VERDICTS: tuple[Verdict, ...] = (*_FAILURES, "passed", "skipped", "xfailed", "xpassed", "rerun")
"""All verdicts; those that a reader looks for come first."""
_MOST_ROWS = 50
_MOST = 10
"""Number of tests in the list of the longest waits."""
_SHORTEST_WAIT = 0.1  # Seconds of a wait that is worth showing.
_LONGEST = 300  # Characters of a text that is shown as code.

Cell = str | int | float
"""A text, a number, or a number of seconds."""


def add_to_page(sessions: Sequence[Session], path: str) -> str | None:
    """Add the summary to the page of the job's step, the file `path`; return what went wrong, or None."""
    text = f"\n\n{summary(sessions)}".encode()  # An empty line ends what another program has written.
    try:
        with open(path, "ab") as file:
            if file.tell() + len(text) > LARGEST:
                return f"the job summary {path} has no room for this session: GitHub allows 1 MiB for a step"
            file.write(text)
    except OSError as error:
        return f"the job summary {path} cannot be written: {error.strerror}"
    return None


def summary(sessions: Sequence[Session]) -> str:
    """Return the summary, with an empty line at its end: Markdown after it is no part of its HTML."""
    found = Counter(test.verdict for session in sessions for test in session.tests)
    counts = ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])
    lines = [f"<h2>pytest-accel: {counts or 'no tests'}</h2>"]
    lines += [f"<p>{' · '.join(_facts(session))}</p>" for session in sessions]
    for title, (columns, rows) in _tables(sessions).items():
        if rows:
            lines += [f"<h3>{title}</h3>", _table(columns, [map(_cell, row) for row in rows[:_MOST_ROWS]])]
        if len(rows) > _MOST_ROWS:
            lines.append(f"<p>{len(rows) - _MOST_ROWS} more left out.</p>")
    return "\n".join(lines) + "\n\n"


def _tables(sessions: Sequence[Session]) -> dict[str, tuple[str, Sequence[Sequence[Cell]]]]:
    """Return columns and rows of each table by its title."""
    tests = [test for session in sessions for test in session.tests]
    # In the order in which they ended.
    failed = sorted((test for test in tests if test.verdict in _FAILURES), key=lambda test: test.span.stop)
    waits = [(one.waited, one.why_waited) for one in tests if one.why_waited and one.waited >= _SHORTEST_WAIT]
    skipped = [test for test in tests if test.verdict == "skipped"]
    missing = Counter(test.missing for test in skipped if test.missing)
    skips = Counter(test.skip for test in skipped if not test.missing)
    return {
        "Devices": ("machine | kind | number | names | in use (%)", _device_rows(sessions)),
        f"Failures ({len(failed)})": ("test | ranks | place | cause", [*map(_failure_row, failed)]),
        "Longest waits": ("waited (s) | wait", nlargest(_MOST, waits)),
        f"Skipped for missing hardware ({missing.total()})": ("cause | tests", missing.most_common()),
        f"Skipped for other reasons ({skips.total()})": ("reason | tests", skips.most_common()),
    }


def _table(columns: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells in HTML."""
    heads = [f"<th>{column}</th>" for column in columns.split(" | ")]
    lines = [heads, *([f"<td>{cell}</td>" for cell in row] for row in rows)]
    return "\n".join(["<table>", *(f"<tr>{''.join(line)}</tr>" for line in lines), "</table>"])


def _cell(value: Cell) -> str:
    return _code(value) if isinstance(value, str) else f"{value:.1f}" if isinstance(value, float) else str(value)


def escaped(text: str) -> str:
    """Return `text` with escapes for characters that a terminal could not show, or would obey."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def _code(text: str) -> str:
    """Return `text` on one line of limited length, with escapes in place of control characters and lone surrogates."""
    line = escaped(cut_end(" ".join(text.split()), _LONGEST))
    return f"<code>{escape(line)}</code>" if text else ""


def _facts(session: Session) -> Iterator[str]:
    """Yield the facts about a session as a whole."""
    yield _code(session.host)
    yield f"{datetime.fromtimestamp(session.span.start, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    yield f"took {session.span.seconds:.2f} s"
    if session.started.shard is not None:
        yield "shard {}/{}".format(*session.started.shard)
    killed = "killed: the record has no end of the session"
    yield killed if session.finished is None else f"exit status {session.finished.status}"


def _failure_row(test: TestRun) -> tuple[str, str, str, str]:
    """Return the test, the ranks that failed, the place and the cause."""
    if (phase := test.failure) is None:
        return test.test, "", "", "it was running when the session ended" if test.verdict == "unfinished" else ""
    return test.test, _failed_ranks(phase), _place(phase), phase.headline


def _failed_ranks(phase: Event) -> str:
    """Return the ranks that a failure is about; empty if there are none."""
    return ranks_text(phase.failed_ranks) if phase.failed_ranks else ""


def _place(phase: Event) -> str:
    """Return the place of a failure; empty if it is unknown."""
    return "" if phase.place is None else f"{phase.place[0]}:{phase.place[1]}"


def _device_rows(sessions: Sequence[Session]) -> list[tuple[Cell, ...]]:
    """Return the devices of each machine by kind, and how much of the time in which tests ran they were in use."""
    names = {lane: device.name for session in sessions for lane, device in session.devices.items()}
    rows: list[tuple[Cell, ...]] = []
    for (host, kind), group in groupby(sorted(names), key=lambda lane: (lane.host, lane.kind)):
        lanes = list(group)
        found = Counter(names[lane] for lane in lanes)
        about = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in found.items())
        there = (session for session in sessions if any(lane.host == host for lane in session.devices))
        tests = [test for session in there for test in session.tests]
        used = sum(test.span.seconds * share for test in tests for lane, share in test.lanes.items() if lane in lanes)
        available = len(lanes) * covered(test.span for test in tests)
        rows.append((host, kind, len(lanes), about, round(100 * used / available) if available else 0))
    return rows


_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Report of pytest-accel</title>
<link rel="icon" href="data:,"/>
<style>
:root { color-scheme: light dark; }
body { margin: 20px 24px; font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid #8884; vertical-align: top; text-align: left; }
pre { white-space: pre-wrap; font-size: 12px; }
code { font: inherit; }
th { overflow-wrap: normal; }
</style>
</head>
<body>
"""
_COLUMNS = "verdict | test | time (s) | wait (s) | device-seconds | devices | peak memory"


def page(sessions: Sequence[Session]) -> str:
    """Return the page of ``--accel-report``: one HTML file that needs no other, and has no script."""
    tests = sorted(
        (one for session in sessions for one in session.tests),
        key=lambda one: (VERDICTS.index(one.verdict), -one.span.seconds),
    )
    labels = {lane: f"{lane.kind} {device.index}" for one in sessions for lane, device in one.devices.items()}
    if len({lane.host for lane in labels}) > 1:
        labels = {lane: f"{lane.host}: {label}" for lane, label in labels.items()}
    # Not in the summary, since options may be secret: what GitHub replaces in logs, it may not find in HTML.
    commands = "".join(f"<p>{_code(shlex.join(['pytest', *one.started.command]))}</p>\n" for one in sessions)
    table = _table(_COLUMNS, (_test_row(test, labels) for test in tests))
    return f"{_HEAD}{commands}{summary(sessions)}<h3>Tests</h3>\n{table}\n</body>\n</html>\n"


def _test_row(test: TestRun, labels: dict[Lane, str]) -> Iterator[str]:
    """Yield the cells of a test."""
    yield test.verdict
    yield escape(test.test) if test.failure is None else _details(test)
    yield from (f"{value:.2f}" for value in (test.span.seconds, test.waited, test.device_seconds))
    devices = ((labels.get(lane, lane.name), share) for lane, share in test.lanes.items())
    yield escape(", ".join(name if share == 1 else f"{name} (share {share:g})" for name, share in devices))
    yield escape(", ".join(f"rank {rank}: {format_memory(peak)}" for rank, peak in test.peaks.items()))


def _details(test: TestRun) -> str:
    """Return the name of a test that has failed, above its phases, failure and output, which a click shows."""
    parts = [f"<details><summary>{escape(test.test)}</summary>"]
    for phase in test.phases:
        about = ", ".join(filter(None, (f"{phase.when} {phase.outcome}", _failed_ranks(phase), _place(phase))))
        lines = [about, *([phase.headline] if phase.headline else [])]
        for rank in phase.ranks:
            seconds = f" {rank.stop - rank.start:.2f} s" if rank.start else ""
            lines.append(f"rank {rank.rank}: {rank.ending}{seconds}")
        parts.append(f"<p>{'<br/>'.join(map(escape, lines))}</p>")
        parts += [f"<pre>{escape(phase.failure)}</pre>"] if phase.failure else []
        parts += [f"<h4>{escape(name)}</h4><pre>{escape(text)}</pre>" for name, text in phase.output.items()]
    return "\n".join([*parts, "</details>"])
