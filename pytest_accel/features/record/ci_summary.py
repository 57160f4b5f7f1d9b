"""The summary of one or several sessions in CI systems: GitHub Actions, Buildkite and GitLab.

Names of tests, reasons, messages and names of machines may contain anything. Each is shown on one line, without control
characters, and as the text that it is: it has no meaning in Markdown, HTML or a table.

- GitHub Actions shows the file of ``GITHUB_STEP_SUMMARY``, and an annotation for each line ``::error ...::...``.
- Buildkite shows what ``buildkite-agent annotate`` reads.
- GitLab has no page for a summary; its log has sections that one can open.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.record_events import PhaseReported, SessionFinished
from pytest_accel.core.terminal_lines import escaped
from pytest_accel.core.truncation import cut_end
from pytest_accel.core.units import count_text
from pytest_accel.features.record.timeline import Lane, Session, TestRun, Verdict, seconds_with_tests

LARGEST = 1 << 20
"""Bytes in UTF-8 that GitHub allows for the summaries of a step, and Buildkite for an annotation."""
FAILURES: tuple[Verdict, ...] = ("failed", "error", "unfinished")
_VERDICTS: tuple[Verdict, ...] = (*FAILURES, "passed", "skipped", "xfailed", "xpassed", "rerun")
_SUCCESS = (SessionFinished(0), SessionFinished(5))
_MOST = 10
"""Tests in the lists of the slowest ones and of the longest waits."""
_SHORTEST_WAIT = 0.1
"""Seconds of a wait that is worth showing."""
_LONGEST = 300
"""Characters of a cell."""
_ENTITIES = str.maketrans({one: f"&#{ord(one)};" for one in "&<>\"'`*_{}[]()|~#!$@^\\"})
"""The characters with a meaning in HTML, in Markdown or in GitHub's extensions of it."""

_Cell = str | int | float
"""A text, a number, or a number of seconds."""


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[_Cell, ...]]

    def is_numeric(self, column: int) -> bool:
        return not isinstance(self.rows[0][column], str)


@dataclass(frozen=True, slots=True)
class _Block:
    """A table as text."""

    head: str
    rows: Iterable[str]
    """Only those that fit are made."""
    count: int


def summary(sessions: Sequence[Session], *, room: int = LARGEST, job: str = "") -> str:
    """Return the summary in GitHub's Markdown, in at most `room` bytes of UTF-8.

    Rows that do not fit are left out and counted. Empty if not even the number of tests fits. `job` is the name of the
    job, for a page that shows several.
    """
    title = "pytest-accel" + (f", {_code(job)}" if job else "")
    start = "\n\n".join([f"## {title}: {_counts(sessions)}", *_facts(sessions, _code)]) + "\n"
    return _fit(start, [_markdown(table) for table in _tables(sessions)], room)


def plain_summary(sessions: Sequence[Session]) -> str:
    """Return the summary as text for a log."""
    start = "".join(f"{line}\n" for line in (_counts(sessions), *_facts(sessions, printable)))
    return _fit(start, [_text(table) for table in _tables(sessions)], LARGEST)


def printable(text: str) -> str:
    """Return `text` on one line of limited length, with escapes in place of control characters and lone surrogates."""
    return escaped(cut_end(" ".join(text.split()), _LONGEST))


def failures_of(sessions: Iterable[Session]) -> list[tuple[Session, TestRun]]:
    """Return the tests that failed or did not end, and their sessions; those that failed first come first."""
    found = [(session, test) for session in sessions for test in session.tests if test.verdict in FAILURES]
    return sorted(found, key=lambda pair: pair[1].span.stop)


def cause_of(test: TestRun) -> str:
    """Return the line that says why a test failed."""
    if test.verdict == "unfinished":
        return "it was running when the session ended"
    return "" if test.failure is None else test.failure.headline


def succeeded(sessions: Iterable[Session]) -> bool:
    """Return whether all sessions have ended with pytest's exit status for success, or without a test."""
    return all(session.finished in _SUCCESS for session in sessions)


def _counts(sessions: Iterable[Session]) -> str:
    counts = Counter(test.verdict for session in sessions for test in session.tests)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]) or "no tests"


def _facts(sessions: Sequence[Session], show: Callable[[str], str]) -> Iterator[str]:
    """Yield a line on all sessions, and one for each whose failure no test explains. `show` makes a name harmless."""
    seconds = max(one.span.stop for one in sessions) - min(one.span.start for one in sessions)
    hosts = ", ".join(show(host) for host in dict.fromkeys(session.host for session in sessions))
    yield f"{count_text(len(sessions), 'session')} on {hosts}, {seconds:.1f} s"
    for session in sessions:
        if session.finished is None:
            yield f"A session on {show(session.host)} was killed: its record has no end."
        elif not succeeded([session]) and not failures_of([session]):
            yield f"A session on {show(session.host)} ended with exit status {session.finished.status}."


def _tables(sessions: Sequence[Session]) -> Iterator[_Table]:
    """Yield the tables that have rows."""
    tests = [test for session in sessions for test in session.tests]
    failures = [_failure_row(test) for _, test in failures_of(sessions)]
    slowest = nlargest(_MOST, (test for test in tests if test.lanes), key=lambda one: (one.device_seconds, one.span))
    waits = [(test.waited, test.wait.why) for test in tests if test.wait and test.waited >= _SHORTEST_WAIT]
    missing = Counter(test.missing for test in tests if test.verdict == "skipped" and test.missing)
    skips = Counter(test.skip for test in tests if test.verdict == "skipped" and not test.missing)
    for table in (
        _Table("Devices", ("machine", "kind", "number", "names", "in use (%)"), _device_rows(sessions)),
        _Table(f"Failures ({len(failures)})", ("test", "ranks", "place", "cause"), failures),
        _Table(
            "Slowest tests by device-seconds",
            ("test", "device-seconds", "seconds", "devices", "waited (s)"),
            [(one.test, one.device_seconds, one.span.seconds, _devices(one), one.waited) for one in slowest],
        ),
        _Table("Longest waits", ("waited (s)", "wait"), nlargest(_MOST, (wait for wait in waits if wait[1]))),
        _Table(f"Skipped for missing hardware ({missing.total()})", ("cause", "tests"), missing.most_common()),
        _Table(f"Skipped for other reasons ({skips.total()})", ("reason", "tests"), skips.most_common()),
    ):
        if table.rows:
            yield table


def _failure_row(test: TestRun) -> tuple[_Cell, ...]:
    phase = test.failure
    ranks = "" if phase is None or not phase.failed_ranks else ranks_text(phase.failed_ranks)
    place = "" if phase is None or phase.place is None else f"{phase.place[0]}:{phase.place[1]}"
    return test.test, ranks, place, cause_of(test)


def _devices(test: TestRun) -> int:
    return sum(lane.session is None for lane, _ in test.lanes)


def _device_rows(sessions: Sequence[Session]) -> list[tuple[_Cell, ...]]:
    """Return the devices of each machine by kind, and how much of the time in which tests ran they were in use."""
    names: dict[tuple[str, str], dict[Lane, str]] = {}
    ran: dict[str, list[TestRun]] = {}
    used: dict[tuple[str, str], float] = {}
    for session in sessions:
        for lane, device in session.devices.items():
            names.setdefault((lane.host, lane.kind), {})[lane] = device.name
        for host in {lane.host for lane in session.devices}:
            ran.setdefault(host, []).extend(session.tests)
        for test in session.tests:
            for lane, share in test.lanes:
                key = lane.host, lane.kind
                used[key] = used.get(key, 0.0) + test.span.seconds * share
    rows: list[tuple[_Cell, ...]] = []
    for (host, kind), devices in sorted(names.items()):
        counts = Counter(devices.values())
        about = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
        available = len(devices) * seconds_with_tests(ran[host])
        in_use = used.get((host, kind), 0.0) / available if available else 0.0
        rows.append((host, kind, len(devices), about, round(100 * in_use)))
    return rows


def _fit(start: str, blocks: Iterable[_Block], room: int) -> str:
    """Return `start` and as many rows of each block as fit into `room` bytes; empty if `start` does not fit."""
    room -= _size(start)
    if room < 0:
        return ""
    for block in blocks:
        # A block takes half of what is left, so that a long one leaves room for those after it.
        left = room // 2 - _size(block.head) - _size(_left_out(block.count))
        if left < 0:
            continue
        kept: list[str] = []
        for row in block.rows:
            left -= _size(row)
            if left < 0:
                break
            kept.append(row)
        omitted = block.count - len(kept)
        text = block.head + "".join(kept) + (_left_out(omitted) if omitted else "")
        start += text
        room -= _size(text)
    return start


def _size(text: str) -> int:
    return len(text.encode())


def _left_out(rows: int) -> str:
    return f"\n{rows} more left out: the text would be too long.\n"


def _code(text: str) -> str:
    return f"<code>{printable(text).translate(_ENTITIES)}</code>" if text else ""


def _shown(cell: _Cell) -> str:
    """Return a number as text."""
    return f"{cell:.1f}" if isinstance(cell, float) else str(cell)


def _markdown(table: _Table) -> _Block:
    lines = (
        "",
        f"### {table.title}",
        "",
        _row(table.columns),
        _row(["---:" if table.is_numeric(column) else ":---" for column in range(len(table.columns))]),
        "",
    )
    rows = (_row([_code(cell) if isinstance(cell, str) else _shown(cell) for cell in row]) for row in table.rows)
    return _Block("\n".join(lines), (f"{row}\n" for row in rows), len(table.rows))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(table: _Table) -> _Block:
    rows = [[printable(cell) if isinstance(cell, str) else _shown(cell) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(table.columns, *rows, strict=True)]
    header, *lines = (
        "  "
        + "  ".join(
            cell.rjust(width) if table.is_numeric(number) else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        + "\n"
        for row in [table.columns, *rows]
    )
    return _Block(f"\n{table.title}\n{header}", lines, len(lines))


_MOST_ANNOTATIONS = 10
"""Errors of a step that GitHub shows."""
_AGENT_TIMEOUT = 30.0  # Seconds. The agent sends the annotation to Buildkite.


def show(sessions: Sequence[Session], environment: Mapping[str, str], *, annotate: bool) -> Iterator[str]:
    """Show `sessions` in each system whose variables are in `environment`; yield the lines to write to the job's log.

    Without `annotate`, no failures are annotated on GitHub. A summary that cannot be shown is a line.
    """
    if path := environment.get("GITHUB_STEP_SUMMARY"):
        if (problem := append_summary(sessions, path)) is not None:
            yield f"accel: {problem}"
        if annotate:
            yield from error_lines(sessions, environment.get("GITHUB_WORKSPACE"))
    if environment.get("BUILDKITE") and (problem := annotate_build(sessions, environment)) is not None:
        yield f"accel: {problem}"
    if environment.get("GITLAB_CI"):
        yield from log_section(sessions)


def append_summary(sessions: Sequence[Session], path: str) -> str | None:
    """Append the summary to the file `path`, as far as GitHub's limit allows. Return what went wrong, or None."""
    try:
        with open(path, "ab") as file:
            before = b"\n\n" if file.tell() else b""  # A heading needs an empty line before it.
            text = summary(sessions, room=LARGEST - file.tell() - len(before))
            if text:
                file.write(before + text.encode())
    except OSError as error:
        return f"the job summary {path} cannot be written: {error.strerror}"
    return None if text else f"the job summary {path} has no room for this session: GitHub allows 1 MiB for a step"


def error_lines(sessions: Sequence[Session], workspace: str | None) -> Iterator[str]:
    """Yield the commands by which GitHub annotates the first failures. `workspace` is the repository's folder."""
    for session, test in failures_of(sessions)[:_MOST_ANNOTATIONS]:
        properties = {"title": printable(test.test)}
        if (found := _place(session, test, workspace)) is not None:
            properties = {"file": found[0], "line": str(found[1])} | properties
        shown = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
        yield f"::error {shown}::{_data(printable(cause_of(test)))}"


def _place(session: Session, test: TestRun, workspace: str | None) -> tuple[str, int] | None:
    """Return file and line of the failure or else of the test, the first of both that is in the repository."""
    phase: PhaseReported | None = test.failure
    if phase is None:
        return None
    for file, line in (phase.place or ("", 1), (phase.file, phase.line or 1)):
        path = os.path.realpath(os.path.join(session.started.root, file))
        folder = os.path.realpath(workspace or session.started.root)
        if file and path.startswith(folder + os.sep):
            return os.path.relpath(path, folder), line
    return None


def _data(text: str) -> str:
    """Return `text` as the message of a workflow command, as GitHub's toolkit writes it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return `text` as a property of a workflow command, as GitHub's toolkit writes it."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def annotate_build(
    sessions: Sequence[Session], environment: Mapping[str, str], *, timeout: float = _AGENT_TIMEOUT
) -> str | None:
    """Add the summary to the build's page. Return what went wrong; None also for a machine without the agent."""
    agent = shutil.which("buildkite-agent", path=environment.get("PATH"))
    if agent is None:
        return None
    # Each job has its own annotation, to which its later sessions append.
    context = "-".join(filter(None, ("accel", environment.get("BUILDKITE_JOB_ID"))))
    style = "info" if succeeded(sessions) else "error"
    text = "\n" + summary(sessions, room=LARGEST - 1, job=environment.get("BUILDKITE_LABEL", ""))
    try:
        done = subprocess.run(
            [agent, "annotate", "--style", style, "--context", context, "--append"],
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"took longer than {timeout:g} s" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        return f"buildkite-agent annotate: {why}"
    return f"buildkite-agent annotate: exit status {done.returncode}" if done.returncode else None


def log_section(sessions: Sequence[Session]) -> Iterator[str]:
    """Yield the lines of a section of GitLab's log that is closed at first."""
    name, start, stop = (f"accel_{sessions[0].started.session}", *(round(one) for one in sessions[0].span))
    yield f"\033[0Ksection_start:{start}:{name}[collapsed=true]\r\033[0Kaccel: summary of the session"
    yield from plain_summary(sessions).splitlines()
    yield f"\033[0Ksection_end:{stop}:{name}\r\033[0K"
