"""The details of one test on the report page, as HTML. All text of the record is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from html import escape

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.truncation import cut
from pytest_accel.core.units import count_text, format_memory
from pytest_accel.features.record.events import Event
from pytest_accel.features.record.timeline import Session, TestRun

TEXT_BUDGET = 2_000_000
"""Characters of failures and captured output on a page. Compressed, they take about a fifth of that, in a browser less
than a tenth of a second to decompress."""

_ENDINGS = {"hung": "did not finish", "unstarted": "did not start", "stopped": "stopped after another rank"}
"""Words for the ends of phases in ranks that are not clear by themselves."""


def longest_text(tests: Iterable[TestRun]) -> int:
    """Return the number of characters to which a text is truncated, so that all together have at most `TEXT_BUDGET`."""
    lengths = [
        len(text) for test in tests for phase in test.phases for text in (phase.failure, *phase.output.values()) if text
    ]
    return TEXT_BUDGET if sum(lengths) <= TEXT_BUDGET else TEXT_BUDGET // len(lengths)


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


def details(test: TestRun, session: Session, longest: int) -> str:
    """Return the details of `test` as HTML, in which each text has at most about `longest` characters."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(test, session))
    parts = [f"<h3>{escape(test.test)}</h3>"]
    for phase in test.phases:
        if phase.headline:
            parts.append(f'<p>{escape(_where(phase))}<br><span class="bad">{escape(phase.headline)}</span></p>')
    parts += [f"<dl>{facts}</dl>", _phases(test)]
    for phase in test.phases:
        texts = {f"Failure in {phase.when}": phase.failure, **phase.output}
        parts += [
            f"<h4>{escape(name)}</h4><pre>{escape(cut(text, longest))}</pre>" for name, text in texts.items() if text
        ]
    return "".join(parts)


def _where(phase: Event) -> str:
    """Return phase, ranks and place of a failure."""
    ranks = ranks_text(phase.failed_ranks) if phase.failed_ranks else ""
    place = "" if phase.place is None else f"{phase.place[0]}:{phase.place[1]}"
    return ", ".join(filter(None, (f"{phase.when} {phase.outcome}", ranks, place)))


def _facts(test: TestRun, session: Session) -> Iterator[tuple[str, str]]:
    span, wait, world = test.span, test.wait, test.world
    yield "verdict", test.verdict
    yield "ran", f"{seconds_text(span.seconds)}, from {clock(span.start)}"
    if test.phases and (file := test.phases[0].file):
        yield "place", file if test.phases[0].line is None else f"{file}:{test.phases[0].line}"
    if test.worker:
        yield "worker", test.worker
    if test.missing or test.skip:
        yield "skipped", test.missing or test.skip
    for xfail in [phase.xfail for phase in test.phases if phase.xfail is not None][:1]:
        yield "expected failure", xfail or "no reason given"
    if wait is not None:
        yield "waited", f"{seconds_text(test.waited)}: {wait.why}".removesuffix(": ")
        if wait.ended is not None:
            yield "got no ranks", wait.ended.why
    if test.lanes:
        names = [
            f"{'CPU slot ' if lane.kind == 'slot' else ''}{lane.name}{'' if share == 1 else f' (share {share:g})'}"
            for lane, share in test.lanes.items()
        ]
        yield "ran on", ", ".join(names) + (f" of {next(iter(test.lanes)).host}" if len(session.machines) > 1 else "")
    if world is not None:
        start = world.starting
        about = f"{start.world} ({start.about}, {count_text(len(start.places), 'rank')})"
        if wait is None or wait.world is not world:
            yield "world", f"{about}, kept from the test before in the same process"
        elif wait.starts_world:
            took = "" if world.ready is None else f" in {seconds_text(world.ready.at - start.at)}"
            yield "world", f"{about}, started for this test{took}"
        else:
            yield "world", f"{about}, reused: another test had started it"
    if test.peaks:
        yield "peak memory", ", ".join(f"rank {rank}: {format_memory(peak)}" for rank, peak in test.peaks.items())


def _phases(test: TestRun) -> str:
    """Return a table of the phases, with a row for each rank if there are ranks."""
    phases = [(phase, {one.rank: one for one in phase.ranks}) for phase in test.phases]
    head = "".join(f"<th>{escape(phase.when)}</th>" for phase, _ in phases)
    cells = [_cell(phase.outcome, phase.start, phase.stop) for phase, _ in phases]
    rows = f"<tr>{head}</tr><tr>{''.join(cells)}</tr>"
    ranks = sorted({rank for _, by_rank in phases for rank in by_rank})
    if ranks:
        rows = f"<tr><th></th>{head}</tr>"
    for rank in ranks:
        found = (by_rank.get(rank) for _, by_rank in phases)
        cells = ["<td></td>" if one is None else _cell(one.ending, one.start, one.stop) for one in found]
        rows += f"<tr><th>rank {rank}</th>{''.join(cells)}</tr>"
    return f'<h4>{"Ranks" if ranks else "Phases"}</h4><div class="scroll"><table>{rows}</table></div>'


def _cell(ending: str, start: float, stop: float) -> str:
    text = escape(_ENDINGS.get(ending, ending))
    if ending not in ("passed", "skipped"):
        text = f'<span class="bad">{text}</span>'
    return f"<td>{text} {seconds_text(stop - start) if start else ''}</td>"
