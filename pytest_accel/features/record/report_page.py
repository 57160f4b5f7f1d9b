"""The page of ``--accel-report``: one HTML file that needs no other.

Bokeh makes the plots. The rest is a template, which escapes all text of the record, and `page_script`.
"""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bokeh.embed import file_html
from bokeh.resources import Resources

from pytest_accel.features.record import page_script, page_style
from pytest_accel.features.record.page_details import TEMPLATES, clock, details, longest_text, seconds_text
from pytest_accel.features.record.page_plots import lane_label, timeline
from pytest_accel.features.record.timeline import Session, TestRun, covered

_COLUMNS = (
    ("verdict", "verdict", "verdict"),
    ("test", "test", "name"),
    ("seconds", "time (s)", "number"),
    ("wait", "wait (s)", "number wide"),
    ("device_seconds", "device-seconds", "number wide"),
    ("devices", "devices", "devices"),
    ("peak", "peak (GiB)", "number wide"),
)
"""Key, title and CSS classes of the columns of the table. A narrow window does not show `wide` columns."""
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
{% if has_plot %}
<p class="muted">Drag to zoom, click a bar for details.</p>
<p class="key">{% for label, colour in legend %}<span>{{ dot(colour) }}{{ label }}</span>{% endfor %}</p>
<div id="{{ roots.timeline.elementid }}" data-root-id="{{ roots.timeline.id }}" style="display: contents"></div>
{% else %}
<p class="muted">No test ran in ranks.</p>
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
{% else %}
<p class="muted">No test ran.</p>
{% endif %}
{% if skips %}
<h2>Skipped</h2>
<table id="skips">
<tr><th class="number" scope="col">tests</th><th scope="col">reason</th></tr>
{% for (other, reason), count in skips %}
<tr><td class="number">{{ count }}</td><td>{{ reason }}
{%- if not other %} <span class="muted">(missing hardware)</span>{% endif %}</td></tr>
{% endfor %}
</table>
{% endif %}
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
    verdicts = list(page_style.COLOURS)
    tests = sorted((one for session in sessions for one in session.tests), key=lambda one: verdicts.index(one.verdict))
    plot, legend = timeline(sessions, {id(test): row for row, test in enumerate(tests)})
    longest = longest_text(tests)
    columns = _columns(sessions, tests)
    about = [details(test, devices, longest) for test, devices in zip(tests, columns["devices"], strict=True)]
    data = json.dumps((columns, about))
    title = "Report of a session" if len(sessions) == 1 else f"Report of {len(sessions)} sessions"
    variables = {
        "style": page_style.PAGE,
        "script": page_script.SCRIPT,
        "packed": base64.b64encode(zlib.compress(data.encode("ascii"), 9)).decode("ascii"),
        "columns": _COLUMNS,
        "verdicts": [verdict for verdict in verdicts if verdict in {test.verdict for test in tests}],
        "has_plot": plot is not None,
        "legend": legend,
        "colours": page_style.COLOURS,
        "sessions": [_summary(session) for session in sessions],
        "skips": _skips(tests),
    }
    template = TEMPLATES.from_string(_TEMPLATE)
    if plot is None:
        return template.render(variables, title=title)
    resources = Resources(mode="inline", minified=True)
    html: str = file_html(plot, resources, title=title, template=template, template_variables=variables)
    return html


def _columns(sessions: Sequence[Session], tests: Sequence[TestRun]) -> dict[str, list[Any]]:
    """Return the columns of the table by name. Times are seconds, and memory is GiB."""
    several = len({lane.host for test in tests for lane in test.lanes}) > 1
    labels = {lane: lane_label(lane, sessions) for test in tests for lane in test.lanes}

    def devices(test: TestRun) -> str:
        shares = (labels[lane] + (f" (share {share:g})" if share < 1 else "") for lane, share in test.lanes.items())
        names = ", ".join(shares)
        return f"{next(iter(test.lanes)).host}: {names}" if several and test.lanes else names

    return {
        "test": [test.test for test in tests],
        "verdict": [test.verdict for test in tests],
        "seconds": [round(test.span.seconds, 4) for test in tests],
        "wait": [round(test.waited, 4) for test in tests],
        "device_seconds": [round(test.device_seconds, 4) for test in tests],
        "devices": [devices(test) for test in tests],
        "peak": [round(max(test.peaks.values()) / (1 << 30), 4) if test.peaks else None for test in tests],
        "ran": [
            f"{test.verdict}, ran {seconds_text(test.span.seconds)}, waited {seconds_text(test.waited)}, "
            f"started {clock(test.span.start)}"
            for test in tests
        ],
    }


def _summary(session: Session) -> dict[str, Any]:
    """Return the facts of the page about a session as a whole."""
    counts = Counter(test.verdict for test in session.tests)
    facts = [session.host, clock(session.span.start), f"took {seconds_text(session.span.seconds)}"]
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
        "counts": [(verdict, counts[verdict]) for verdict in page_style.COLOURS if counts[verdict]],
        "facts": facts,
        "killed": session.finished is None,
        "use": use,
    }


def _skips(tests: Sequence[TestRun]) -> list[tuple[tuple[bool, str], int]]:
    """Return the causes of skips, each whether no hardware is missing, and the reason, with its number of tests."""
    counts = Counter((not test.missing, test.missing or test.skip) for test in tests if test.verdict == "skipped")
    return sorted(counts.items(), key=lambda item: (item[0][0], -item[1]))
