"""The plot of the report page, which Bokeh draws: the tests on devices and workers over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    Label,
    PlainText,
    Range1d,
    TapTool,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.transform import linear_cmap

from pytest_accel.core.truncation import cut_end
from pytest_accel.features.record.page_style import COLOURS, START_COLOUR, WAIT_COLOUR
from pytest_accel.features.record.timeline import Lane, Session, TestRun, lane_rows

_BARS = [*COLOURS.items(), ("waits", WAIT_COLOUR), ("ranks start", START_COLOUR)]
"""The kinds of bars with their colours; a bar has the position of its kind."""
_WAIT, _START = len(COLOURS), len(COLOURS) + 1
_LONGEST_LABEL = 12
_SHORTEST_WAIT = 0.01
"""Seconds; the bar of a shorter wait could hardly be seen."""
_TOOLTIP = """
<div style="font-weight:600">@n{test}</div>
<div>@n{ran}</div>
<div>@n{devices}</div>
"""
_CELL = 'return accel.tests === null ? "" : accel.tests[format][value]'
"""The text of a column, by the row of a test. `page_script` defines `accel`."""
_CHOOSE = "accel.choose(bars.selected.indices.length ? bars.data.n[bars.selected.indices[0]] : -1)"


def lane_label(lane: Lane, sessions: Sequence[Session]) -> str:
    """Return a short name of `lane` that is unique on its machine: its id, or kind and index if the id is long."""
    index = next((session.devices[lane].index for session in sessions if lane in session.devices), None)
    return lane.name if len(lane.name) <= _LONGEST_LABEL or index is None else f"{lane.kind} {index}"


def timeline(sessions: Sequence[Session], rows: Mapping[int, int]) -> tuple[figure | None, list[tuple[str, str]]]:
    """Return the plot, and the label and the colour of each kind of its bars; None without a lane.

    `rows` has the row in the table by the `id()` of a `TestRun`.
    """
    lanes = lane_rows(sessions)
    if not lanes:
        return None, []
    origin = min(session.span.start for session in sessions)
    ticks: dict[float, str] = {}
    titles: dict[float, str] = {}
    bars: list[tuple[float, ...]] = []
    bottom, latest = 0.0, None
    several = len({(lane.host, lane.session) for lane, _ in lanes}) > 1
    for lane, of_lane in lanes:
        if several and (lane.host, lane.session) != latest:
            latest = lane.host, lane.session
            workers = "" if lane.session is None else "workers"
            of = f"of session {lane.session + 1}" if lane.session is not None and len(sessions) > 1 else ""
            titles[bottom + 0.6] = " ".join(filter(None, (lane.host, workers, of)))
            bottom += 1.2
        top, height = bottom, 0.6 if len(of_lane) > 1 else 1.0
        for row in of_lane:
            for test in row:
                bars += _bars_of(test, rows[id(test)], bottom, height, shows_wait=next(iter(test.lanes)) == lane)
            bottom += height
        ticks[(top + bottom) / 2] = cut_end(lane_label(lane, sessions), _LONGEST_LABEL)
    columns = np.array(bars, dtype=float).reshape(-1, 6).T
    columns[2:4] -= origin
    # Collection may take most of a session, so show the time in which tests ran.
    shown = (
        (columns[2].min(), columns[3].max()) if bars else (0, max(session.span.stop for session in sessions) - origin)
    )
    plot = figure(
        name="timeline",
        x_range=Range1d(*shown, bounds="auto"),
        y_range=Range1d(bottom, 0),
        height=round(bottom * min(max(560 / bottom, 10), 26)) + 110,
        sizing_mode="stretch_width",
        min_border_left=16 + round(6.4 * max(map(len, ticks.values()))),
        min_border_right=12,
        tools="xbox_zoom,xzoom_in,xzoom_out,reset",
        toolbar_location="above",
        x_axis_label=f"seconds since the {'first ' if len(sessions) > 1 else ''}session's start",
    )
    plot.toolbar.logo = None
    plot.axis.minor_tick_line_color = None
    plot.axis.axis_label_text_font_style = "normal"
    plot.xaxis.formatter.use_scientific = False
    plot.yaxis.ticker = FixedTicker(ticks=list(ticks))
    plot.yaxis.major_label_overrides = {at: PlainText(text=text) for at, text in ticks.items()}
    plot.ygrid.visible = False
    for at, title in titles.items():
        label = Label(x=4, x_units="screen", y=at, text=PlainText(text=title), text_baseline="middle")
        label.update(text_font_size="12px", text_font_style="bold")
        plot.add_layout(label)
    types = {"top": "f4", "bottom": "f4", "left": "f8", "right": "f8", "kind": "i1", "n": "i4"}
    data = {name: column.astype(kind) for (name, kind), column in zip(types.items(), columns, strict=True)}
    source = ColumnDataSource(data, name="bars")
    source.selected.js_on_change("indices", CustomJS(args={"bars": source}, code=_CHOOSE))
    colour = linear_cmap("kind", [colour for _, colour in _BARS], -0.5, len(_BARS) - 0.5)
    plot.quad(
        *("left", "right", "top", "bottom"),
        source=source,
        fill_color=colour,
        line_color="black",
        line_alpha=0.5,
        line_width=0.5,
        nonselection_fill_alpha=0.35,
        nonselection_line_alpha=0,
    )
    hover = HoverTool(tooltips=_TOOLTIP, formatters={"@n": CustomJSHover(code=_CELL)}, limit=3)
    hover.point_policy = "follow_mouse"
    plot.add_tools(hover, TapTool(), WheelZoomTool(dimensions="width", modifiers={"ctrl": True}))
    return plot, [_BARS[kind] for kind in np.unique(data["kind"])]


def _bars_of(test: TestRun, n: int, top: float, height: float, *, shows_wait: bool) -> Iterator[tuple[float, ...]]:
    """Yield top, bottom, start, stop and kind of the bars of a test on one lane, and the row `n` of the test."""
    wait, span = test.wait, test.span
    if wait is not None and wait.leased is not None:
        if shows_wait and test.waited > _SHORTEST_WAIT:
            yield top + 0.7 * height, top + 0.95 * height, wait.requested.at, wait.leased, _WAIT, n
        if wait.starts_world:
            yield top + 0.35 * height, top + 0.65 * height, wait.leased, span.start, _START, n
    yield top + 0.08 * height, top + 0.8 * height, *span, list(COLOURS).index(test.verdict), n
