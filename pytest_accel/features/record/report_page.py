"""The page of ``--accel-report``: one HTML file that needs no other.

Bokeh makes the plots and the table of tests. The rest is a template; it escapes all text of the record.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jinja2
from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models import Button, ColumnDataSource, CustomJS, Div, InlineStyleSheet, LayoutDOM
from bokeh.resources import Resources

from pytest_accel.features.record import page_style
from pytest_accel.features.record.page_details import clock, details, packed, seconds_text, truncation
from pytest_accel.features.record.page_plots import table, tests_source, timeline
from pytest_accel.features.record.timeline import Session, StepKind, TestRun, critical_path, seconds_with_tests

_STEPS: dict[StepKind, str] = {
    "test": "tests",
    "wait": "waits for devices or CPU slots",
    "ranks": "starts of ranks",
    "other": "other: collection, workers, reports",
}
_CHOOSE_TEST = """
const n = bars.selected.indices.length ? bars.data.n[bars.selected.indices[0]] : -1
tests.selected.indices = n < 0 ? [] : [n]
"""
_SHOW_TEST = """
const [n] = tests.selected.indices
if (bars !== null) {
  const chosen = []
  bars.data.n.forEach((test, bar) => { if (test === n) chosen.push(bar) })
  bars.selected.indices = chosen
}
panel.visible = n !== undefined
if (n === undefined) return
const show = (details) => { text.text = details[n] }
if (panel.tags.length) return show(panel.tags[0])
const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0))
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))
return new Response(stream).json().then((details) => { panel.tags = [details]; show(details) })
"""
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
{{ root("plots") }}
{% else %}
<p class="muted">No test ran on a device or CPU slot.</p>
{% endif %}
<h2>Tests</h2>
{{ root("table") }}
{% if skips %}
<h2>Skipped</h2>
<table id="skips">
<tr><th class="number">tests</th><th>reason</th></tr>
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
<div style="flex:{{ seconds }};background:{{ steps[kind] }}"></div>
{% endfor %}
</div>
<p class="key">
{% for kind, seconds in path.totals %}
<span>{{ dot(steps[kind]) }}{{ kinds[kind] }}: {{ seconds_text(seconds) }}
({{ "%.0f" | format(100 * seconds / path.seconds) }} %)</span>
{% endfor %}
</p>
<details{% if path.steps | length <= 20 %} open{% endif %}><summary>{{ path.steps | length }} steps</summary>
<div class="scroll steps"><table class="path">
<tr><th class="number">from</th><th class="number">seconds</th><th>step</th><th>test</th></tr>
{% for step in path.steps %}
<tr><td class="number">{{ "%.2f" | format(step.span.start - path.start) }}</td><td class="number">
{{- "%.2f" | format(step.span.seconds) }}</td><td>{{ step.kind }}</td><td>{{ step.test }}</td></tr>
{% endfor %}
</table></div></details>
{% endfor %}
{{ root("panel") }}
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
    source = tests_source(sessions, tests)
    plots = timeline(sessions, {id(test): row for row, test in enumerate(tests)}, source)
    shorten = truncation(tests)
    texts = packed([details(test, session, shorten) for test, session in runs])
    roots: list[LayoutDOM] = [table(source), _panel(source, None if plots is None else plots.bars, texts)]
    names = ["table", "panel"]
    if plots is not None:
        roots.append(column(*plots.plots, sizing_mode="stretch_width"))
        names.append("plots")
    for name, root in zip(names, roots, strict=True):
        root.name = name
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE)
    title = "Report of a session" if len(sessions) == 1 else f"Report of {len(sessions)} sessions"
    html: str = file_html(
        roots,
        Resources(mode="inline", minified=True),
        title=title,
        template=template,
        template_variables={
            "style": page_style.PAGE,
            "has_plots": plots is not None,
            "colours": page_style.COLOURS,
            "steps": page_style.STEP_COLOURS,
            "kinds": _STEPS,
            "seconds_text": seconds_text,
            "sessions": [_summary(session) for session in sessions],
            "skips": _skips(tests),
            "paths": [_path(session) for session in sessions],
        },
    )
    return html


def _panel(tests: ColumnDataSource, bars: ColumnDataSource | None, texts: str) -> LayoutDOM:
    """Return the panel that shows the test that is selected, in the table or by one of its bars."""
    sheet = InlineStyleSheet(css=page_style.DETAILS_TEXT)
    text = Div(name="details", sizing_mode="stretch_width", disable_math=True, stylesheets=[sheet])
    close = Button(label="Close", width=70, stylesheets=[InlineStyleSheet(css=page_style.CLOSE)])
    close.js_on_click(CustomJS(args={"tests": tests}, code="tests.selected.indices = []"))
    panel = column(close, text, visible=False, stylesheets=[InlineStyleSheet(css=page_style.DETAILS)])
    show = CustomJS(args={"tests": tests, "bars": bars, "panel": panel, "text": text, "packed": texts}, code=_SHOW_TEST)
    tests.selected.js_on_change("indices", show)
    if bars is not None:
        bars.selected.js_on_change("indices", CustomJS(args={"tests": tests, "bars": bars}, code=_CHOOSE_TEST))
    return panel


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
