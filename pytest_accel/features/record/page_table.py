"""The table of tests on the report page, and its filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from bokeh.layouts import column, row
from bokeh.models import (
    BooleanFilter,
    CDSView,
    ColumnDataSource,
    CustomJS,
    DataTable,
    Div,
    InlineStyleSheet,
    LayoutDOM,
    NumberFormatter,
    Select,
    StringFormatter,
    TableColumn,
    TextInput,
)
from bokeh.transform import factor_cmap

from pytest_accel.features.record import page_style
from pytest_accel.features.record.page_timeline import lane_label
from pytest_accel.features.record.timeline import Session, TestRun

_ALL = "all"
_SPACE = (0, 12, 10, 0)
_FILTER = """
const part = text.value_input.toLowerCase()
const {test, verdict} = tests.data
const chosen = Array.from(test, (name, i) => (
  name.toLowerCase().includes(part) && (select.value === all || select.value === verdict[i])
))
filter.booleans = chosen
count.text = `${chosen.filter(Boolean).length} of ${chosen.length} tests`
"""


def tests_source(sessions: Sequence[Session], tests: Sequence[TestRun]) -> ColumnDataSource:
    """Return the rows of the table. Times are seconds (`start` from the first session's start), and memory is GiB."""
    origin = min(session.span.start for session in sessions)
    spans = [test.span for test in tests]
    several = len({lane.host for test in tests for lane, _ in test.lanes}) > 1
    labels = {lane: lane_label(lane, sessions) for test in tests for lane, _ in test.lanes}

    def devices(test: TestRun) -> str:
        names = ", ".join(labels[lane] for lane, _ in test.lanes)
        return f"{test.lanes[0][0].host}: {names}" if several and test.lanes else names

    return ColumnDataSource(
        {
            "test": [test.test for test in tests],
            "verdict": [test.verdict for test in tests],
            "seconds": np.array([span.seconds for span in spans], "f4"),
            "wait": np.array([test.waited for test in tests], "f4"),
            "device_seconds": np.array([test.device_seconds for test in tests], "f4"),
            "devices": [devices(test) for test in tests],
            "ranks": np.array([0 if test.world is None else len(test.world.ranks) for test in tests], "i4"),
            "peak": np.array([np.nan if test.peak is None else test.peak / (1 << 30) for test in tests], "f4"),
            "start": np.array([span.start - origin for span in spans], "f8"),
        }
    )


def table(tests: ColumnDataSource) -> LayoutDOM:
    """Return the table of `tests` with its filters."""
    names, verdicts = tests.data["test"], tests.data["verdict"]
    kept = BooleanFilter()
    widgets = [InlineStyleSheet(css=page_style.WIDGETS)]
    text = TextInput(title="Test", placeholder="part of its name", width=260, margin=_SPACE, stylesheets=widgets)
    options = [_ALL, *(verdict for verdict in page_style.COLOURS if verdict in set(verdicts))]
    select = Select(title="Verdict", value=_ALL, options=options, width=130, margin=_SPACE, stylesheets=widgets)
    count = Div(text=f"{len(names)} of {len(names)} tests", align="end", margin=_SPACE, stylesheets=widgets)
    filtering = CustomJS(
        args={"tests": tests, "text": text, "select": select, "filter": kept, "count": count, "all": _ALL}, code=_FILTER
    )
    text.js_on_change("value_input", filtering)
    select.js_on_change("value", filtering)
    colours = factor_cmap("verdict", list(page_style.COLOURS.values()), list(page_style.COLOURS))
    number = NumberFormatter(format="0.00", text_align="right", nan_format="")
    columns = [
        TableColumn(
            field="verdict",
            title="verdict",
            width=90,
            formatter=StringFormatter(text_color=colours, font_style="bold"),
        ),
        TableColumn(field="test", title="test", width=420),
        TableColumn(field="seconds", title="time (s)", width=75, formatter=number),
        TableColumn(field="wait", title="wait (s)", width=70, formatter=number),
        TableColumn(field="device_seconds", title="device-seconds", width=125, formatter=number),
        TableColumn(field="devices", title="devices", width=220),
        TableColumn(field="ranks", title="ranks", width=60, formatter=NumberFormatter(text_align="right")),
        TableColumn(
            field="peak",
            title="peak (GiB)",
            width=100,
            formatter=number,
        ),
    ]
    rows = DataTable(
        source=tests,
        view=CDSView(filter=kept),
        columns=columns,
        index_position=None,
        reorderable=False,
        multi_selectable=False,
        height=min(30 + 28 * max(len(names), 3), 460),
        row_height=28,
        margin=0,
        sizing_mode="stretch_width",
        min_width=1000,
        stylesheets=[InlineStyleSheet(css=page_style.TABLE)],
        name="tests",
    )
    scrolling = column(rows, sizing_mode="stretch_width", styles={"overflow-x": "auto"})
    filters = row(text, select, count, sizing_mode="stretch_width", styles={"flex-wrap": "wrap"})
    return column(filters, scrolling, sizing_mode="stretch_width")
