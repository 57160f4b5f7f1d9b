"""The summary of sessions: tables, in Markdown for the page of a job of GitHub Actions, and in HTML with all tests.

In GitHub's Markdown, names of tests, reasons, messages and names of machines may contain anything. Each is shown on one
line, without control characters, and as the text that it is: it has no meaning in Markdown, HTML or a table.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from heapq import nlargest
from importlib.util import find_spec
from itertools import groupby
from typing import NamedTuple

from pytest_accel.core.terminal_lines import escaped
from pytest_accel.core.truncation import cut_end, ranks_text
from pytest_accel.core.units import count_text, format_memory
from pytest_accel.features.record.record_file import Event, RecordError
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
_LONGEST = 300  # Characters of a cell in Markdown.
_ENTITIES = str.maketrans({one: f"&#{ord(one)};" for one in "&<>\"'`*_{}[]()|~#!$@^\\"})
"""The characters with a meaning in HTML, in Markdown or in GitHub's extensions of it."""
_LONGEST_LABEL = 12
_ENDINGS = {"hung": "did not finish", "unstarted": "did not start", "stopped": "stopped after another rank"}
"""Words for the ends of phases in ranks that are not clear by themselves."""

Cell = str | int | float
"""A text, a number, or a number of seconds."""


class Table(NamedTuple):
    """A table of the summary."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left_out: int
    """Number of rows that the table lacks: it has at most `_MOST_ROWS`."""


def add_to_page(sessions: Sequence[Session], path: str) -> str | None:
    """Add the summary to the page of the job's step, the file `path`; return what went wrong, or None."""
    text = markdown(sessions).encode()
    try:
        with open(path, "ab") as file:
            if file.tell() + len(text) > LARGEST:
                return f"the job summary {path} has no room for this session: GitHub allows 1 MiB for a step"
            file.write((b"\n\n" if file.tell() else b"") + text)  # A heading needs an empty line before it.
    except OSError as error:
        return f"the job summary {path} cannot be written: {error.strerror}"
    return None


def markdown(sessions: Sequence[Session]) -> str:
    """Return the summary in GitHub's Markdown."""
    seconds = max(one.span.stop for one in sessions) - min(one.span.start for one in sessions)
    hosts = ", ".join(map(_code, dict.fromkeys(session.host for session in sessions)))
    about = f"{count_text(len(sessions), 'session')} on {hosts}, {seconds:.1f} s"
    parts = [f"## pytest-accel: {counts(sessions)}", about]
    for session in sessions:  # Name each whose failure no test explains.
        if session.finished is None:
            parts.append(f"A session on {_code(session.host)} was killed: its record has no end.")
        elif session.finished.status not in (0, 5) and not _failures_of(session.tests):
            parts.append(f"A session on {_code(session.host)} ended with exit status {session.finished.status}.")
    for title, columns, rows, left_out in tables(sessions):
        shown = [[_cell(value) for value in row] for row in rows]
        lines = [columns, [":---" if isinstance(cell, str) else "---:" for cell in rows[0]], *shown]
        parts += [f"### {title}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
        if left_out:
            parts.append(f"{left_out} more left out.")
    return "\n\n".join(parts) + "\n"


def counts(sessions: Sequence[Session]) -> str:
    """Return the number of tests with each verdict, in words."""
    found = Counter(test.verdict for session in sessions for test in session.tests)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict]) or "no tests"


def tables(sessions: Sequence[Session]) -> Iterator[Table]:
    """Yield the tables that have rows."""
    tests = [test for session in sessions for test in session.tests]
    failures = [_failure_row(test) for test in _failures_of(tests)]
    waits = [(one.waited, one.wait.why) for one in tests if one.wait and one.wait.why and one.waited >= _SHORTEST_WAIT]
    skipped = [test for test in tests if test.verdict == "skipped"]
    missing = Counter(test.missing for test in skipped if test.missing)
    skips = Counter(test.skip for test in skipped if not test.missing)
    found: dict[str, tuple[str, Sequence[Sequence[Cell]]]] = {
        "Devices": ("machine | kind | number | names | in use (%)", _device_rows(sessions)),
        f"Failures ({len(failures)})": ("test | ranks | place | cause", failures),
        "Longest waits": ("waited (s) | wait", nlargest(_MOST, waits)),
        f"Skipped for missing hardware ({missing.total()})": ("cause | tests", missing.most_common()),
        f"Skipped for other reasons ({skips.total()})": ("reason | tests", skips.most_common()),
    }
    for title, (columns, rows) in found.items():
        if rows:
            yield Table(title, columns.split(" | "), rows[:_MOST_ROWS], max(0, len(rows) - _MOST_ROWS))


def _place(phase: Event) -> str:
    """Return the place of a failure; empty if it is unknown."""
    return "" if phase.place is None else f"{phase.place[0]}:{phase.place[1]}"


def _cell(value: Cell) -> str:
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
    return test.test, ranks_text(phase.failed_ranks) if phase.failed_ranks else "", _place(phase), phase.headline


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


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{{ title }}</title>
<link rel="icon" href="data:,"/>
<style>
:root { color-scheme: light dark; }
body { margin: 20px 24px; font: 14px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; border-bottom: 1px solid #8884; vertical-align: top; text-align: left; }
pre { white-space: pre-wrap; font-size: 12px; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="counts">{{ counts }}</p>
{% for session in sessions %}
<p class="session"><code>{{ command(session) }}</code><br/>{{ facts(session) | join(" · ") }}</p>
{% endfor %}
{% for title, columns, rows, left_out in tables %}
<h2>{{ title }}</h2>
<table>
<tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>
{%- for cell in row %}<td>{{ "%.1f" | format(cell) if cell is float else cell }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% if left_out %}<p>{{ left_out }} more left out.</p>{% endif %}
{% endfor %}
<h2>Tests</h2>
<table id="tests">
<tr>{% for name in ("verdict", "test", "time (s)", "wait (s)", "device-seconds", "devices", "peak memory") %}
<th>{{ name }}</th>{% endfor %}</tr>
{% for test in tests %}
<tr><td>{{ test.verdict }}</td>
<td>{% if test.failure is none %}{{ test.test }}{% else %}<details><summary>{{ test.test }}</summary>
{% for phase in test.phases %}
<p>{{ where(phase) }}{% if phase.headline %}<br/><b>{{ phase.headline }}</b>{% endif %}
{%- for one in phase.ranks %}<br/>rank {{ one.rank }}: {{ endings.get(one.ending, one.ending) }}
{{- " %.2f s" | format(one.stop - one.start) if one.start }}{% endfor %}</p>
{% if phase.failure %}<pre>{{ phase.failure }}</pre>{% endif %}
{% for name, text in phase.output.items() %}<h4>{{ name }}</h4><pre>{{ text }}</pre>{% endfor %}
{% endfor %}
</details>{% endif %}</td>
{%- for value in (test.span.seconds, test.waited, test.device_seconds) %}
<td>{{ "%.2f" | format(value) }}</td>{% endfor %}
<td>{% for lane, share in test.lanes.items() %}{{ ", " if not loop.first }}{{ labels.get(lane, lane.name) }}
{{- " (share %g)" | format(share) if share < 1 }}{% endfor %}</td>
<td>{% for rank, peak in test.peaks.items() %}{{ ", " if not loop.first }}rank {{ rank }}: {{ memory(peak) }}
{%- endfor %}</td></tr>
{% endfor %}
</table>
</body>
</html>
"""
"""A template of Jinja2, which escapes all text of the record."""


def check_jinja() -> None:
    """Raise :class:`RecordError` if a page cannot be made."""
    if find_spec("jinja2") is None:
        raise RecordError("Jinja2 is not installed: pip install 'pytest-accel[report]'")


def page(sessions: Sequence[Session]) -> str:
    """Return the page of ``--accel-report``: one HTML file that needs no other, and has no script.

    Raise :class:`RecordError` without Jinja2.
    """
    check_jinja()
    import jinja2

    tests = sorted(
        (one for session in sessions for one in session.tests),
        key=lambda one: (VERDICTS.index(one.verdict), -one.span.seconds),
    )
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_PAGE)
    return template.render(
        title="Report of a session" if len(sessions) == 1 else f"Report of {len(sessions)} sessions",
        counts=counts(sessions),
        sessions=sessions,
        command=lambda session: shlex.join(["pytest", *session.started.command]),
        facts=_facts,
        tables=tables(sessions),
        tests=tests,
        labels=_labels(sessions),
        memory=format_memory,
        where=_where,
        endings=_ENDINGS,
    )


def _labels(sessions: Sequence[Session]) -> dict[Lane, str]:
    """Return a short name of each device: its id, or kind and index if that is long, after its machine if needed."""
    found = {lane: device.index for session in sessions for lane, device in session.devices.items()}
    is_one_machine = len({lane.host for lane in found}) < 2
    return {
        lane: ("" if is_one_machine else f"{lane.host}: ")
        + (lane.name if len(lane.name) <= _LONGEST_LABEL else f"{lane.kind} {index}")
        for lane, index in found.items()
    }


def _facts(session: Session) -> Iterator[str]:
    """Yield the facts about a session as a whole."""
    yield session.host
    yield f"{datetime.fromtimestamp(session.span.start, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    yield f"took {session.span.seconds:.2f} s"
    if session.started.shard is not None:
        yield "shard {}/{}".format(*session.started.shard)
    killed = "killed: the record has no end of the session"
    yield killed if session.finished is None else f"exit status {session.finished.status}"


def _where(phase: Event) -> str:
    """Return phase, ranks and place of a failure."""
    ranks = ranks_text(phase.failed_ranks) if phase.failed_ranks else ""
    return ", ".join(filter(None, (f"{phase.when} {phase.outcome}", ranks, _place(phase))))
