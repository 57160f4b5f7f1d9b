"""The page of ``--accel-report``: one HTML file that needs no other, and has no script.

The template escapes all text of the record.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import jinja2

from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.truncation import cut
from pytest_accel.core.units import format_memory
from pytest_accel.features.record.record_file import Event
from pytest_accel.features.record.timeline import Lane, Session, TestRun, Verdict, covered, lane_rows

COLOURS: dict[Verdict, str] = {
    "failed": "#d55e00",
    "error": "#cc79a7",
    "unfinished": "#7b6fd0",
    "rerun": "#56b4e9",
    "xpassed": "#e69f00",
    "passed": "#009e73",
    "xfailed": "#9a8b4f",
    "skipped": "#a0a0a0",
}
"""Colours that colour-blind people can tell apart (Okabe and Ito), with light and dark surroundings.

Verdicts that a reader looks for come first: this is the order of the table of tests.
"""
TEXT_BUDGET = 2_000_000
"""Characters of failures and captured output on a page."""
_LONGEST_LABEL = 12
_SHORTEST_WAIT = 0.01
"""Seconds; the bar of a shorter wait could hardly be seen."""
_ENDINGS = {"hung": "did not finish", "unstarted": "did not start", "stopped": "stopped after another rank"}
"""Words for the ends of phases in ranks that are not clear by themselves."""

_TEMPLATE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""<!DOCTYPE html>
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
td.number, th.number { text-align: right; white-space: nowrap; }
tr:target { background: #8884; }
pre { white-space: pre-wrap; font-size: 12px; }
#lanes { width: 100%; }
#lanes th { white-space: nowrap; width: 1%; font-weight: normal; }
.lane { position: relative; height: 18px; }
.lane a { position: absolute; top: 2px; bottom: 4px; min-width: 1px; }
.lane .wait { top: 13px; bottom: 1px; background: #8c8c8c; }
.lane .start { top: 7px; bottom: 7px; background: #0072b2; }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
{% for verdict, colour in colours.items() %}.{{ verdict }} { background: {{ colour }}; }
{% endfor %}
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for one in sessions %}
<section class="session">
<p class="counts">
{%- for verdict, count in one.counts %}<span><i class="dot {{ verdict }}"></i>{{ count }} {{ verdict }}</span> {# #}
{%- else %}no test ran{% endfor %}</p>
<p><code>{{ one.command }}</code><br/>{{ one.facts | join(" · ") }}</p>
{% if one.killed %}<p><b>killed: the record has no end of the session</b></p>{% endif %}
{% if one.use %}<p>{{ one.use }}</p>{% endif %}
</section>
{% endfor %}
<h2>Devices over time</h2>
{% if lanes %}
<table id="lanes">
{% for label, bars in lanes %}
<tr><th scope="row">{{ label }}</th><td><div class="lane">
{%- for bar in bars %}<a class="{{ bar.kind }}" style="left:{{ bar.left }}%;width:{{ bar.width }}%" {# #}
href="#{{ bar.n }}"{% if bar.title %} title="{{ bar.title }}"{% endif %}></a>{% endfor %}</div></td></tr>
{% endfor %}
</table>
{% else %}
<p>No test ran in ranks.</p>
{% endif %}
<h2>Tests</h2>
<table id="tests">
<tr><th>verdict</th><th>test</th>
{%- for name in ("time (s)", "wait (s)", "device-seconds") %}<th class="number">{{ name }}</th>{% endfor -%}
<th>devices</th><th class="number">peak memory</th></tr>
{% for test in tests %}
<tr id="{{ loop.index0 }}"><td><i class="dot {{ test.verdict }}"></i>{{ test.verdict }}</td>
<td>{% if test.failure is none %}{{ test.test }}{% else %}<details><summary>{{ test.test }}</summary>
{% for phase in test.phases if phase.headline %}<p>{{ where(phase) }}<br/><b>{{ phase.headline }}</b></p>
{% endfor %}
<table><tr><th></th>{% for phase in test.phases %}<th>{{ phase.when }}</th>{% endfor %}</tr>
{% for rank, cells in ranks(test) %}<tr><th>rank {{ rank }}</th>
{%- for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for name, text in texts(test) %}<h4>{{ name }}</h4><pre>{{ cut(text, longest) }}</pre>
{% endfor %}
</details>{% endif %}</td>
{%- for value in (test.span.seconds, test.waited, test.device_seconds) %}
<td class="number">{{ "%.2f" | format(value) }}</td>{% endfor %}
<td>{{ devices(test) }}</td><td class="number">{{ peaks(test) }}</td></tr>
{% endfor %}
</table>
{% if skips %}
<h2>Skipped</h2>
<table id="skips">
<tr><th class="number">tests</th><th>reason</th></tr>
{% for (other, reason), count in skips %}
<tr><td class="number">{{ count }}</td><td>{{ reason }}{{ "" if other else " (missing hardware)" }}</td></tr>
{% endfor %}
</table>
{% endif %}
</body>
</html>
""")


def page(sessions: Sequence[Session]) -> str:
    """Return the page of `sessions`."""
    verdicts = list(COLOURS)
    tests = sorted(
        (one for session in sessions for one in session.tests),
        key=lambda one: (verdicts.index(one.verdict), -one.span.seconds),
    )
    labels = {lane: _label(lane, sessions) for lane, _ in lane_rows(sessions)}

    def devices(test: TestRun) -> str:
        shares = test.lanes.items()
        return ", ".join(labels[lane] + (f" (share {share:g})" if share < 1 else "") for lane, share in shares)

    return _TEMPLATE.render(
        title="Report of a session" if len(sessions) == 1 else f"Report of {len(sessions)} sessions",
        colours=COLOURS,
        sessions=[_summary(session) for session in sessions],
        lanes=list(_lanes(sessions, tests)),
        tests=tests,
        skips=_skips(tests),
        devices=devices,
        peaks=_peaks,
        where=_where,
        ranks=_ranks,
        texts=_texts,
        cut=cut,
        longest=_longest_text(tests),
    )


def _label(lane: Lane, sessions: Sequence[Session]) -> str:
    """Return a short name of `lane`: its id, or kind and index if the id is long; its machine if there are several."""
    index = next((session.devices[lane].index for session in sessions if lane in session.devices), None)
    name = lane.name if len(lane.name) <= _LONGEST_LABEL or index is None else f"{lane.kind} {index}"
    if lane.session is not None and len(sessions) > 1:
        name += f" of session {lane.session + 1}"
    return name if len({one.host for session in sessions for one in session.devices}) < 2 else f"{lane.host}: {name}"


def _lanes(sessions: Sequence[Session], tests: Sequence[TestRun]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the label and the bars of each row of the plot. Positions are percentages of the time of all bars."""
    numbers = {id(test): number for number, test in enumerate(tests)}
    rows = [(lane, tests) for lane, of_lane in lane_rows(sessions) for tests in of_lane]
    found = [[(test, *bar) for test in tests for bar in _bars_of(test, lane)] for lane, tests in rows]
    times = [at for bars in found for _, _, begin, end, _ in bars for at in (begin, end)]
    origin, length = (min(times), max(times) - min(times) or 1.0) if times else (0.0, 1.0)
    for (lane, _), bars in zip(rows, found, strict=True):
        yield (
            _label(lane, sessions),
            [
                {
                    "kind": kind,
                    "left": round(100 * (begin - origin) / length, 2),
                    "width": round(100 * max(0.0, end - begin) / length, 2),
                    "n": numbers[id(test)],
                    "title": text and f"{test.test}: {text}",
                }
                for test, kind, begin, end, text in bars
            ],
        )


def _bars_of(test: TestRun, lane: Lane) -> Iterator[tuple[str, float, float, str]]:
    """Yield kind, begin, end and text of the bars of a test on `lane`. Only the first of its lanes has the wait."""
    wait, span = test.wait, test.span
    if wait is not None and wait.leased is not None:
        if test.waited > _SHORTEST_WAIT and lane == next(iter(test.lanes)):
            yield "wait", wait.requested.at, wait.leased, f"waited {_seconds(test.waited)}: {wait.why}"
        if wait.starts_world:
            yield "start", wait.leased, span.start, ""
    yield test.verdict, *span, f"{test.verdict}, ran {_seconds(span.seconds)} from {_clock(span.start)}"


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _peaks(test: TestRun) -> str:
    return ", ".join(f"rank {rank}: {format_memory(peak)}" for rank, peak in test.peaks.items())


def _where(phase: Event) -> str:
    """Return phase, ranks and place of a failure."""
    ranks = ranks_text(phase.failed_ranks) if phase.failed_ranks else ""
    place = "" if phase.place is None else f"{phase.place[0]}:{phase.place[1]}"
    return ", ".join(filter(None, (f"{phase.when} {phase.outcome}", ranks, place)))


def _ranks(test: TestRun) -> Iterator[tuple[int, list[str]]]:
    """Yield each rank, and how each phase has ended there."""
    for rank in sorted({one.rank for phase in test.phases for one in phase.ranks}):
        ends = [next((one for one in phase.ranks if one.rank == rank), None) for phase in test.phases]
        yield (
            rank,
            [
                ""
                if one is None
                else f"{_ENDINGS.get(one.ending, one.ending)} " + (_seconds(one.stop - one.start) if one.start else "")
                for one in ends
            ],
        )


def _texts(test: TestRun) -> Iterator[tuple[str, str]]:
    """Yield failures and captured output with their titles."""
    for phase in test.phases:
        texts = {f"Failure in {phase.when}": phase.failure, **phase.output}
        yield from ((name, text) for name, text in texts.items() if text)


def _longest_text(tests: Iterable[TestRun]) -> int:
    """Return the number of characters to which a text is truncated, so that all together have at most `TEXT_BUDGET`."""
    lengths = [len(text) for test in tests for _, text in _texts(test)]
    return TEXT_BUDGET if sum(lengths) <= TEXT_BUDGET else TEXT_BUDGET // len(lengths)


def _summary(session: Session) -> dict[str, Any]:
    """Return the facts of the page about a session as a whole."""
    counts = Counter(test.verdict for test in session.tests)
    facts = [session.host, _clock(session.span.start), f"took {_seconds(session.span.seconds)}"]
    if session.started.shard is not None:
        facts.append("shard {}/{}".format(*session.started.shard))
    if session.finished is not None:
        facts.append(f"exit status {session.finished.status}")
    use = ""
    if session.devices and (seconds := covered(test.span for test in session.tests)) > 0:
        mean = sum(test.device_seconds for test in session.tests) / seconds
        part = mean / len(session.devices)
        use = f"{mean:.1f} of {len(session.devices)} devices in use on average while tests ran ({part:.0%})"
    return {
        "command": shlex.join(["pytest", *session.started.command]),
        "counts": [(verdict, counts[verdict]) for verdict in COLOURS if counts[verdict]],
        "facts": facts,
        "killed": session.finished is None,
        "use": use,
    }


def _skips(tests: Sequence[TestRun]) -> list[tuple[tuple[bool, str], int]]:
    """Return the causes of skips, each whether no hardware is missing, and the reason, with its number of tests."""
    counts = Counter((not test.missing, test.missing or test.skip) for test in tests if test.verdict == "skipped")
    return sorted(counts.items(), key=lambda item: (item[0][0], -item[1]))
