"""The details of one test on the report page, as HTML. All text of the record is escaped."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape

from pytest_accel.core.record_events import PhaseReported, RankPhase
from pytest_accel.core.truncation import cut
from pytest_accel.core.units import count_text, format_memory
from pytest_accel.features.record.timeline import Session, TestRun, WorldLife

TEXT_BUDGET = 2_000_000
"""Characters of failures and captured output on a page. Compressed, they take about a fifth of that, in a browser less
than a tenth of a second to decompress."""

_ENDINGS = {"hung": "did not finish", "unstarted": "did not start", "stopped": "stopped after another rank"}
"""Words for the ends of phases in ranks that are not clear by themselves."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """How long a text of a page may be, so that all texts together have at most `TEXT_BUDGET` characters."""

    longest: int | None
    """Characters; None if no text is truncated."""

    def __call__(self, text: str) -> str:
        return text if self.longest is None else cut(text, self.longest)


def truncation(tests: Iterable[TestRun]) -> Truncation:
    """Return the truncation that shortens only the longest texts of `tests`."""
    lengths = sorted(len(text) for test in tests for phase in test.phases for text in _texts(phase))
    left = TEXT_BUDGET
    for position, length in enumerate(lengths):
        equal = left // (len(lengths) - position)
        if length > equal:
            return Truncation(equal)
        left -= length
    return Truncation(None)


def packed(data: object) -> str:
    """Return `data` as compressed JSON, in base64."""
    return base64.b64encode(zlib.compress(json.dumps(data).encode("ascii"), 9)).decode("ascii")


def clock(at: float) -> str:
    """Return a time for people."""
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def seconds_text(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 100:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def details(test: TestRun, session: Session, shorten: Truncation) -> str:
    """Return the details of `test` as HTML."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(test, session))
    parts = [f"<h3>{escape(test.test)}</h3>"]
    for phase in test.phases:
        if phase.headline:
            parts.append(f'<p>{escape(_where(phase))}<br><span class="bad">{escape(phase.headline)}</span></p>')
    parts += [f"<dl>{facts}</dl>", _phases(test)]
    for phase in test.phases:
        if phase.failure:
            parts.append(f"<h4>Failure in {escape(phase.when)}</h4><pre>{escape(shorten(phase.failure))}</pre>")
        for name, text in phase.output.items():
            parts.append(f"<h4>{escape(name)}</h4><pre>{escape(shorten(text))}</pre>")
    return "".join(parts)


def _texts(phase: PhaseReported) -> list[str]:
    return [phase.failure, *phase.output.values()]


def _where(phase: PhaseReported) -> str:
    """Return phase, ranks and place of a failure."""
    ranks = f"rank{'s' if len(phase.failed_ranks) > 1 else ''} {', '.join(map(str, phase.failed_ranks))}"
    place = None if phase.place is None else f"{phase.place[0]}:{phase.place[1]}"
    return ", ".join(filter(None, [f"{phase.when} {phase.outcome}", ranks if phase.failed_ranks else None, place]))


def _facts(test: TestRun, session: Session) -> Iterator[tuple[str, str]]:
    span = test.span
    yield "verdict", test.verdict
    yield "ran", f"{seconds_text(span.seconds)}, from {clock(span.start)}"
    first = next(iter(test.phases), None)
    if first is not None and first.file:
        yield "place", first.file if first.line is None else f"{first.file}:{first.line}"
    if test.worker:
        yield "worker", test.worker
    if test.skip or test.missing:
        yield "skipped", test.missing or test.skip
    xfail = next((phase.xfail for phase in test.phases if phase.xfail is not None), None)
    if xfail is not None:
        yield "expected failure", xfail or "no reason given"
    if test.wait is not None:
        yield "waited", f"{seconds_text(test.waited)}{': ' if test.wait.why else ''}{test.wait.why}"
        if test.wait.failed:
            yield "got no ranks", test.wait.failed
    if test.lanes:
        yield (
            "ran on",
            ", ".join(
                f"{'CPU slot ' if lane.kind == 'slot' else ''}{lane.name}{'' if share == 1 else f' (share {share:g})'}"
                for lane, share in test.lanes
            )
            + (f" of {test.lanes[0][0].host}" if len(session.machines) > 1 else ""),
        )
    if test.world is not None:
        yield "world", _world(test, test.world)
    if test.launched:
        yield "launched", f"{count_text(test.launched, 'rank')} (fixture launch)"
    peaks = {rank: peak for phase in test.phases for rank, peak in phase.peaks.items()}
    if peaks:
        yield "peak memory", ", ".join(f"rank {rank}: {format_memory(peak)}" for rank, peak in peaks.items())


def _world(test: TestRun, world: WorldLife) -> str:
    """Return what ranks the test had, and whether they were started for it."""
    about = f"{world.number} ({world.about}, {count_text(len(world.ranks), 'rank')})"
    if test.wait is None or test.wait.world is not world:
        return f"{about}, kept from the test before in the same process"
    if test.wait.leased == world.starting:
        took = "" if world.ready is None else f" in {seconds_text(world.ready - world.starting)}"
        return f"{about}, started for this test{took}"
    return f"{about}, reused: another test had started it"


def _phases(test: TestRun) -> str:
    """Return a table of the phases, with a row for each rank."""
    ranks = sorted({one.rank for phase in test.phases for one in phase.ranks})
    head = "".join(f"<th>{escape(phase.when)}</th>" for phase in test.phases)
    if not ranks:
        cells = "".join(f"<td>{_cell(phase.outcome, phase.start, phase.stop)}</td>" for phase in test.phases)
        return "<h4>Phases</h4>" + _scrolling(f"<tr>{head}</tr><tr>{cells}</tr>")
    rows = []
    by_phase = [{one.rank: one for one in phase.ranks} for phase in test.phases]
    for rank in ranks:
        cells = "".join(f"<td>{_rank_cell(in_phase.get(rank))}</td>" for in_phase in by_phase)
        rows.append(f"<tr><th>rank {rank}</th>{cells}</tr>")
    return "<h4>Ranks</h4>" + _scrolling(f"<tr><th></th>{head}</tr>{''.join(rows)}")


def _scrolling(rows: str) -> str:
    return f'<div class="scroll"><table>{rows}</table></div>'


def _rank_cell(phase: RankPhase | None) -> str:
    return "" if phase is None else _cell(phase.ending, phase.start, phase.stop)


def _cell(ending: str, start: float, stop: float) -> str:
    text = escape(_ENDINGS.get(ending, ending))
    if ending not in ("passed", "skipped"):
        text = f'<span class="bad">{text}</span>'
    return f"{text} {seconds_text(stop - start)}" if start else text
