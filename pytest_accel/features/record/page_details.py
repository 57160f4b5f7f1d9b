"""The details of one test on the report page, as HTML. The template escapes all text of the record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timezone

import jinja2

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.truncation import cut
from pytest_accel.core.units import count_text, format_memory
from pytest_accel.features.record.events import Event
from pytest_accel.features.record.timeline import TestRun

TEXT_BUDGET = 2_000_000
"""Characters of failures and captured output on a page. Compressed, they take about a fifth of that, in a browser less
than a tenth of a second to decompress."""
TEMPLATES = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
_ENDINGS = {"hung": "did not finish", "unstarted": "did not start", "stopped": "stopped after another rank"}
"""Words for the ends of phases in ranks that are not clear by themselves."""
_TEMPLATE = TEMPLATES.from_string("""
<h3>{{ test.test }}</h3>
{% for phase in test.phases if phase.headline %}
<p>{{ where(phase) }}<br><span class="bad">{{ phase.headline }}</span></p>
{% endfor %}
<dl>{% for name, value in facts if value %}<dt class="muted">{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
<h4>Phases</h4>
<div class="scroll"><table>
<tr><th></th>{% for phase in test.phases %}<th>{{ phase.when }}</th>{% endfor %}</tr>
{% for name, cells in rows.items() %}
<tr><th>{{ name }}</th>
{%- for ending, text in cells %}<td{% if ending not in ("passed", "skipped") %} class="bad"{% endif %}>{{ text }}</td>
{%- endfor %}</tr>
{% endfor %}
</table></div>
{% for name, text in texts %}<h4>{{ name }}</h4><pre>{{ text }}</pre>{% endfor %}
""")


def longest_text(tests: Iterable[TestRun]) -> int:
    """Return the number of characters to which a text is truncated, so that all together have at most `TEXT_BUDGET`."""
    lengths = [len(text) for test in tests for _, text in _texts(test)]
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


def details(test: TestRun, devices: str, longest: int) -> str:
    """Return the details of `test`, which ran on `devices`, as HTML; a text has at most about `longest` characters."""
    rows = {"test": [_cell(phase.outcome, phase.start, phase.stop) for phase in test.phases]}
    for rank in sorted({one.rank for phase in test.phases for one in phase.ranks}):
        of_rank = [next((one for one in phase.ranks if one.rank == rank), None) for phase in test.phases]
        rows[f"rank {rank}"] = [
            ("passed", "") if one is None else _cell(one.ending, one.start, one.stop) for one in of_rank
        ]
    texts = [(name, cut(text, longest)) for name, text in _texts(test)]
    return _TEMPLATE.render(test=test, where=_where, facts=_facts(test, devices), rows=rows, texts=texts)


def _texts(test: TestRun) -> Iterator[tuple[str, str]]:
    """Yield failures and captured output with their titles."""
    for phase in test.phases:
        texts = {f"Failure in {phase.when}": phase.failure, **phase.output}
        yield from ((name, text) for name, text in texts.items() if text)


def _where(phase: Event) -> str:
    """Return phase, ranks and place of a failure."""
    ranks = ranks_text(phase.failed_ranks) if phase.failed_ranks else ""
    place = "" if phase.place is None else f"{phase.place[0]}:{phase.place[1]}"
    return ", ".join(filter(None, (f"{phase.when} {phase.outcome}", ranks, place)))


def _facts(test: TestRun, devices: str) -> Iterator[tuple[str, str]]:
    """Yield names and values. A value that the test does not have is empty."""
    wait, world = test.wait, test.world
    yield "verdict", test.verdict
    yield "ran", f"{seconds_text(test.span.seconds)}, from {clock(test.span.start)}"
    yield "place", next((f"{one.file}:{one.line or 1}" for one in test.phases if one.file), "")
    yield "worker", test.worker
    yield "skipped", test.missing or test.skip
    yield "expected failure", next((one.xfail or "no reason" for one in test.phases if one.xfail is not None), "")
    if wait is not None:
        yield "waited", f"{seconds_text(test.waited)}: {wait.why}".removesuffix(": ")
        yield "got no ranks", "" if wait.ended is None else wait.ended.why
    yield "ran on", devices
    if world is not None:
        began = "started for this test" if wait is not None and wait.starts_world else "of an earlier test"
        yield "world", f"{world.about}, {count_text(len(world.places), 'rank')}, {began}"
    yield "peak memory", ", ".join(f"rank {rank}: {format_memory(peak)}" for rank, peak in test.peaks.items())


def _cell(ending: str, start: float, stop: float) -> tuple[str, str]:
    return ending, f"{_ENDINGS.get(ending, ending)} {seconds_text(stop - start) if start else ''}"
