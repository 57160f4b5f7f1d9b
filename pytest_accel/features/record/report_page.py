"""The page of ``--accel-report``: one HTML file that needs no other.

Bokeh makes the plots. The rest is a template, which escapes all text of the record, and `page_script`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jinja2
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.resources import Resources

from pytest_accel.core.units import count_text
from pytest_accel.features.record import page_script, page_style
from pytest_accel.features.record.page_details import clock, details, packed, seconds_text, truncation
from pytest_accel.features.record.page_plots import table_columns, timeline
from pytest_accel.features.record.timeline import Session, StepKind, TestRun, critical_path, seconds_with_tests

_STEPS: dict[StepKind, str] = {
    "test": "tests",
    "wait": "waits for devices or CPU slots",
    "ranks": "starts of ranks",
    "other": "other: collection, workers, reports",
}
_COLUMNS = (
    ("verdict", "verdict", ""),
    ("test", "test", "name"),
    ("seconds", "time (s)", "number"),
    ("wait", "wait (s)", "number wide"),
    ("device_seconds", "device-seconds", "number wide"),
    ("devices", "devices", "devices"),
    ("ranks", "ranks", "number wide"),
    ("peak", "peak (GiB)", "number wide"),
)
"""Key, title and CSS classes of the columns of the table. A narrow window does not show those that are `wide`."""
_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>{{ style | safe }}</style>
{{ bokeh_js | safe }}
</head>
<body>
{% macro dot(colour) %}<i class="dot" style="background:{{ colour }}"></i>{% endmacro %}
{% macro root(name) %}
<div id="{{ roots[name].elementid }}" data-root-id="{{ roots[name].id }}" style="display: contents"></div>
{% endmacro %}
<header>
<h1>{{ title }}</h1>
<div class="sessions">
{% for one in sessions %}
<section class="session">
<p class="counts">
{%- for verdict, count in one.counts %}<span>{{ dot(colours[verdict]) }}{{ count }} {{ verdict }}</span>
{%- else %}no test ran{% endfor %}</p>
<p><code>{{ one.command }}</code></p>
<p class="muted">{{ one.facts | join(" · ") }}</p>
{% if one.killed %}<p class="killed">killed: the record has no end of the session</p>{% endif %}
{% if one.use %}<p>{{ one.use }}</p>{% endif %}
</section>
{% endfor %}
</div>
</header>
<h2>Devices over time</h2>
{% if has_plots %}
<p class="muted">Drag to zoom, click a bar for details, click the legend to hide bars.</p>
<div class="legend">
{% for label, background in legend %}
<button type="button" aria-pressed="true"><i style="background:{{ background }}"></i>{{ label }}</button>
{% endfor %}
</div>
{{ root("plots") }}
{% else %}
<p class="muted">No test ran on a device or CPU slot.</p>
{% endif %}
<h2>Tests</h2>
{% if verdicts %}
<form class="filters">
<label>Test <input id="part" type="search" placeholder="part of its name" autocomplete="off"></label>
<label>Verdict <select id="verdict"><option>all</option>
{%- for verdict in verdicts %}<option>{{ verdict }}</option>{% endfor %}</select></label>
<output id="count"></output>
</form>
<table id="tests">
<thead><tr>{% for key, title, classes in columns %}
<th class="{{ classes }}" scope="col"><button type="button" data-key="{{ key }}">{{ title }}</button></th>
{%- endfor %}</tr></thead>
<tbody></tbody>
</table>
<p><button id="more" type="button" hidden>Show more</button></p>
{% else %}
<p class="muted">No test ran.</p>
{% endif %}
{% if skips %}
<h2>Skipped</h2>
<table id="skips">
<tr><th class="number" scope="col">tests</th><th scope="col">reason</th></tr>
{% for reason, missing, count in skips %}
<tr><td class="number">{{ count }}</td><td>{{ reason }}{% if missing %} <span class="muted">(missing hardware)</span>
{%- endif %}</td></tr>
{% endfor %}
</table>
{% endif %}
<h2>What bounded the duration</h2>
<p class="muted">Each step had to wait for the one before it: for its devices, its CPU slots or its process.</p>
{% for path in paths %}
{% if paths | length > 1 %}<p><code>{{ path.command }}</code></p>{% endif %}
<div class="bar">
{% for kind, seconds in path.totals %}
<div style="width:{{ 100 * seconds / path.seconds }}%;background:{{ steps[kind] }}"></div>
{% endfor %}
</div>
<p class="key">
{% for kind, seconds in path.totals %}
<span>{{ dot(steps[kind]) }}{{ kinds[kind] }}: {{ seconds_text(seconds) }}
({{ "%.0f" | format(100 * seconds / path.seconds) }} %)</span>
{% endfor %}
</p>
<details{% if path.steps | length <= 20 %} open{% endif %}>
<summary>{{ count_text(path.steps | length, "step") }}</summary>
<div class="scroll steps"><table class="path">
<tr><th class="number">from</th><th class="number">seconds</th><th>step</th><th>test</th></tr>
{% for step in path.steps %}
<tr><td class="number">{{ "%.2f" | format(step.span.start - path.start) }}</td><td class="number">
{{- "%.2f" | format(step.span.seconds) }}</td><td>{{ step.kind }}</td><td>{{ step.test }}</td></tr>
{% endfor %}
</table></div></details>
{% endfor %}
<section id="details" aria-label="Details of a test" hidden>
<button id="close" type="button">Close</button>
<div id="text"></div>
</section>
<script>const packed = "{{ packed }}"{{ script | safe }}</script>
{{ plot_script | safe }}
</body>
</html>
"""


def page(sessions: Sequence[Session]) -> str:
    """Return the page of `sessions`."""
    severity = {verdict: position for position, verdict in enumerate(page_style.COLOURS)}
    runs = [(test, session) for session in sessions for test in session.tests]
    runs.sort(key=lambda run: severity[run[0].verdict])
    tests = [test for test, _ in runs]
    plots = timeline(sessions, {id(test): row for row, test in enumerate(tests)})
    shorten = truncation(tests)
    title = "Report of a session" if len(sessions) == 1 else f"Report of {len(sessions)} sessions"
    variables = {
        "style": page_style.PAGE,
        "script": page_script.SCRIPT,
        "packed": packed((table_columns(sessions, tests), [details(test, session, shorten) for test, session in runs])),
        "columns": _COLUMNS,
        "verdicts": [verdict for verdict in page_style.COLOURS if verdict in {test.verdict for test in tests}],
        "has_plots": plots is not None,
        "legend": [] if plots is None else plots.legend,
        "colours": page_style.COLOURS,
        "steps": page_style.STEP_COLOURS,
        "kinds": _STEPS,
        "seconds_text": seconds_text,
        "count_text": count_text,
        "sessions": [_summary(session) for session in sessions],
        "skips": _skips(tests),
        "paths": [_path(session) for session in sessions],
    }
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE)
    if plots is None:
        return template.render(variables, title=title)
    html: str = file_html(
        column(*plots.plots, sizing_mode="stretch_width", name="plots"),
        Resources(mode="inline", minified=True),
        title=title,
        template=template,
        template_variables=variables,
    )
    return html


def _command(session: Session) -> str:
    return shlex.join(["pytest", *session.started.command])


def _summary(session: Session) -> dict[str, Any]:
    """Return what the page says first of a session."""
    counts = Counter(test.verdict for test in session.tests)
    facts = [session.host, clock(session.span.start), f"took {seconds_text(session.span.seconds)}"]
    if session.started.shard is not None:
        facts.append("shard {}/{}".format(*session.started.shard))
    if session.finished is not None:
        facts.append(f"exit status {session.finished.status}")
    use = ""
    if session.devices and (seconds := seconds_with_tests(session.tests)) > 0:
        mean = sum(test.device_seconds for test in session.tests) / seconds
        part = mean / len(session.devices)
        use = f"{mean:.1f} of {len(session.devices)} devices in use on average while tests ran ({part:.0%})"
    return {
        "command": _command(session),
        "counts": [(verdict, counts[verdict]) for verdict in page_style.COLOURS if counts[verdict]],
        "facts": facts,
        "killed": session.finished is None,
        "use": use,
    }


def _skips(tests: Sequence[TestRun]) -> list[tuple[str, bool, int]]:
    """Return reason, whether hardware is missing, and number of tests of each cause: missing hardware first."""
    counts = Counter((test.missing or test.skip, bool(test.missing)) for test in tests if test.verdict == "skipped")
    ordered = sorted(counts.items(), key=lambda item: (not item[0][1], -item[1]))
    return [(reason, missing, count) for (reason, missing), count in ordered]


def _path(session: Session) -> dict[str, Any]:
    steps = critical_path(session)
    totals: Counter[StepKind] = Counter()
    for step in steps:
        totals[step.kind] += step.span.seconds  # type: ignore[assignment]
    return {
        "command": _command(session),
        "start": session.span.start,
        "seconds": session.span.seconds or 1.0,
        "steps": steps,
        "totals": totals.most_common(),
    }
