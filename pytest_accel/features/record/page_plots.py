"""The plots of the report page, which Bokeh draws: the tests and the devices in use over time; and the table's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import (
    CDSView,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    FixedTicker,
    GroupFilter,
    HoverTool,
    Label,
    PlainText,
    Quad,
    Range1d,
    TapTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from pytest_accel.core.truncation import cut_end
from pytest_accel.features.record import page_style
from pytest_accel.features.record.timeline import Lane, Session, TestRun, lane_rows, utilisation

_BARS = (*page_style.COLOURS, "wait", "start")
"""The kinds of bars; a bar has the position of its kind."""
_WAIT, _START = _BARS.index("wait"), _BARS.index("start")
_LABELS = {"wait": "waits", "start": "ranks start"}
_SHARED_ROW = 0.6
"""Height of a row, if tests share a lane; that of a lane with one row is 1."""
_LONGEST_LABEL = 12
_SHORTEST_WAIT = 0.01
"""Seconds; the bar of a shorter wait could hardly be seen."""
_MOST_WAITS = 1000
"""The longest waits are shown, each on one lane: a browser takes longer to hatch a bar than to fill ten."""
_TOOLTIP = """
<div style="font-weight:600">@n{test}</div>
<div>@n{verdict}, ran @n{seconds}, waited @n{wait}</div>
<div>@n{devices}</div>
<div>ranks: @n{ranks}, peak memory: @n{peak}</div>
<div>started @n{start}</div>
"""
_CELL = """
const cell = accel.tests === null ? "" : accel.tests[format][value]
if (cell === null) return format === "ranks" ? "none" : "unknown"
if (typeof cell !== "number") return cell
switch (format) {
  case "peak": return `${cell.toFixed(2)} GiB`
  case "start": return new Date(cell * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC"
  case "ranks": return `${cell}`
  default: return `${cell.toFixed(2)} s`
}
"""
"""The text of a column, by the row of a test. `accel` is that of `page_script`."""
_CHOOSE = "accel.choose(bars.selected.indices.length ? bars.data.n[bars.selected.indices[0]] : -1)"


class Timeline(NamedTuple):
    """The plots, and the legend of the first one. Its renderers are in the order of the legend."""

    plots: list[figure]
    legend: list[tuple[str, str]]
    """The label and the CSS background of each kind of bars."""


def lane_label(lane: Lane, sessions: Sequence[Session]) -> str:
    """Return a short name of `lane` that is unique on its machine: its id, or kind and index if the id is long."""
    if lane.kind == "slot":
        return f"CPU slot {lane.name}"
    indices = (session.devices[lane].index for session in sessions if lane in session.devices)
    index = next(indices, None)
    return lane.name if len(lane.name) <= _LONGEST_LABEL or index is None else f"{lane.kind} {index}"


def timeline(sessions: Sequence[Session], rows: Mapping[int, int]) -> Timeline | None:
    """Return the plots; None if there is no lane. `rows` has the row in the table by the `id()` of a `TestRun`."""
    origin = min(session.span.start for session in sessions)
    lanes = _Lanes(sessions)
    if not lanes.ticks:
        return None
    bars = _bars(lanes, rows, origin)
    height = round(lanes.bottom * min(max(560 / lanes.bottom, 10), 26))
    x_range = Range1d(0, max(session.span.stop for session in sessions) - origin, bounds="auto")
    margin = 16 + round(6.4 * max(map(len, lanes.ticks.values())))
    plot = _plot(x_range, Range1d(lanes.bottom, 0), height + 110, margin)
    plot.name = "timeline"
    plot.yaxis.ticker = FixedTicker(ticks=list(lanes.ticks))
    plot.yaxis.major_label_overrides = {at: PlainText(text=text) for at, text in lanes.ticks.items()}
    plot.ygrid.visible = False
    for at, title in lanes.titles.items():
        label = Label(x=4, x_units="screen", y=at, text=PlainText(text=title), text_baseline="middle")
        label.update(text_font_size="12px", text_font_style="bold")
        plot.add_layout(label)
    legend = _add_bars(plot, bars)
    formatter = CustomJSHover(code=_CELL)
    plot.add_tools(
        HoverTool(tooltips=_TOOLTIP, formatters={"@n": formatter}, point_policy="follow_mouse", limit=3), TapTool()
    )
    plots = [plot]
    if steps := utilisation(sessions):
        total = len({lane for session in sessions for lane in session.devices})
        plots.append(_use(steps, origin, x_range, total, margin))
    plots[-1].xaxis.axis_label = f"seconds since the {'first ' if len(sessions) > 1 else ''}session's start"
    return Timeline(plots, legend)


class _Lanes:
    """Gives each lane its place from top to bottom, and each group of lanes a title if there are several."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.bottom = 0.0
        self.ticks: dict[float, str] = {}
        """The label of each lane by the middle of the lane."""
        self.titles: dict[float, str] = {}
        self.places: list[tuple[TestRun, float, float, bool]] = []
        """Each test on each of its lanes: the top and the bottom of its row, and True for the first of its lanes."""
        seen: set[int] = set()
        lanes = lane_rows(sessions)
        groups = {(lane.host, lane.session) for lane, _ in lanes}
        latest = None
        for lane, rows in lanes:
            group = (lane.host, lane.session)
            if group != latest and len(groups) > 1:
                slots = "" if lane.session is None else "CPU slots"
                of = f" of session {lane.session + 1}" if lane.session is not None and len(sessions) > 1 else ""
                self.titles[self.bottom + 0.6] = f"{lane.host} {slots}{of}".strip()
                self.bottom += 1.2
            latest = group
            top, height = self.bottom, _SHARED_ROW if len(rows) > 1 else 1.0
            for row in rows:
                self.places += [(test, self.bottom, self.bottom + height, id(test) not in seen) for test in row]
                seen.update(map(id, row))
                self.bottom += height
            self.ticks[(top + self.bottom) / 2] = cut_end(lane_label(lane, sessions), _LONGEST_LABEL)


def _bars(lanes: _Lanes, rows: Mapping[int, int], origin: float) -> ColumnDataSource:
    waits = sorted((test.waited for test, *_, first in lanes.places if first), reverse=True)
    shortest = max([_SHORTEST_WAIT, *waits[_MOST_WAITS : _MOST_WAITS + 1]])
    bars = [
        bar
        for test, top, bottom, first in lanes.places
        for bar in _bars_of(test, rows[id(test)], top, bottom, shows_wait=first and test.waited > shortest)
    ]
    columns = np.array(bars, dtype=float).reshape(-1, 6).T
    data: dict[str, Any] = {name: columns[at].astype("f4") for at, name in ((0, "top"), (1, "bottom"))}
    data |= {name: columns[at] - origin for at, name in ((2, "left"), (3, "right"))}
    data |= {"kind": columns[4].astype("i1"), "n": columns[5].astype("i4")}
    return ColumnDataSource(data, name="bars")


def _bars_of(
    test: TestRun, row: int, top: float, bottom: float, *, shows_wait: bool
) -> Iterator[tuple[float, float, float, float, int, int]]:
    """Yield top, bottom, start, stop and kind of the bars of a test on one lane, and the row of the test."""
    height = bottom - top
    span = test.span
    if test.wait is not None and test.wait.leased is not None:
        if shows_wait:
            yield bottom - 0.3 * height, bottom - 0.05 * height, test.wait.requested, test.wait.leased, _WAIT, row
        if test.wait.world is not None and test.wait.world.starting == test.wait.leased:
            yield top + 0.35 * height, bottom - 0.35 * height, test.wait.leased, span.start, _START, row
    yield top + 0.08 * height, bottom - 0.2 * height, *span, list(page_style.COLOURS).index(test.verdict), row


def _add_bars(plot: figure, bars: ColumnDataSource) -> list[tuple[str, str]]:
    """Add the bars, one renderer for each kind, and return the legend."""
    legend = []
    for kind in np.unique(bars.data["kind"]):
        name = _BARS[kind]
        quad = Quad(left="left", right="right", top="top", bottom="bottom", line_color="black", line_alpha=0.5)
        if kind == _WAIT:
            quad.update(fill_alpha=0, line_alpha=0, hatch_pattern="/", hatch_color=page_style.WAIT_COLOUR)
            quad.update(hatch_scale=6, hatch_weight=1.5)
            background = page_style.WAIT_HATCH
        else:
            background = page_style.START_COLOUR if kind == _START else page_style.COLOURS[name]
            quad.update(fill_color=background, line_width=0.5)
        rest = quad.clone()
        rest.update(fill_alpha=0 if kind == _WAIT else 0.35, hatch_alpha=0.35, line_alpha=0)
        view = CDSView(filter=GroupFilter(column_name="kind", group=int(kind)))
        plot.add_glyph(bars, quad, view=view, nonselection_glyph=rest, name=name)
        legend.append((_LABELS.get(name, name), background))
    bars.selected.js_on_change("indices", CustomJS(args={"bars": bars}, code=_CHOOSE))
    return legend


def _use(steps: Sequence[tuple[float, float]], origin: float, x_range: Range1d, devices: int, margin: int) -> figure:
    """Return the plot of the number of devices in use."""
    plot = _plot(x_range, Range1d(0, max(devices, *(used for _, used in steps)) * 1.05), 170, margin)
    times, used = np.array([(x_range.start + origin, 0.0), *steps, (x_range.end + origin, 0.0)]).T
    data = {"at": times - origin, "used": used.astype("f4")}
    source = ColumnDataSource(data)
    colour = page_style.START_COLOUR
    plot.varea_step("at", 0, "used", source=source, step_mode="after", fill_color=colour, fill_alpha=0.2)
    line = plot.step("at", "used", source=source, mode="after", color=colour, line_width=1.5)
    plot.add_tools(HoverTool(renderers=[line], tooltips="@used{0.##} devices in use", mode="vline", line_policy="prev"))
    plot.toolbar_location = None
    plot.yaxis.axis_label = "devices in use"
    plot.yaxis.ticker.update(min_interval=1, desired_num_ticks=4)
    plot.ygrid.ticker = plot.yaxis[0].ticker
    return plot


def _plot(x_range: Range1d, y_range: Range1d, height: int, margin: int) -> figure:
    plot = figure(
        x_range=x_range,
        y_range=y_range,
        height=height,
        sizing_mode="stretch_width",
        min_border_left=margin,
        min_border_right=12,
        tools="xbox_zoom,xzoom_in,xzoom_out,reset",
        toolbar_location="above",
    )
    plot.toolbar.logo = None
    plot.axis.minor_tick_line_color = None
    plot.axis.axis_label_text_font_style = "normal"
    plot.xaxis.formatter.use_scientific = False
    plot.add_tools(WheelZoomTool(dimensions="width", modifiers={"ctrl": True}))
    return plot


def table_columns(sessions: Sequence[Session], tests: Sequence[TestRun]) -> dict[str, list[Any]]:
    """Return the columns of the table by name. Times are seconds (`start` since the epoch), and memory is GiB."""
    several = len({lane.host for test in tests for lane, _ in test.lanes}) > 1
    labels = {lane: lane_label(lane, sessions) for test in tests for lane, _ in test.lanes}

    def devices(test: TestRun) -> str:
        names = ", ".join(labels[lane] for lane, _ in test.lanes)
        return f"{test.lanes[0][0].host}: {names}" if several and test.lanes else names

    return {
        "test": [test.test for test in tests],
        "verdict": [test.verdict for test in tests],
        "seconds": [round(test.span.seconds, 4) for test in tests],
        "wait": [round(test.waited, 4) for test in tests],
        "device_seconds": [round(test.device_seconds, 4) for test in tests],
        "devices": [devices(test) for test in tests],
        "ranks": [test.rank_count for test in tests],
        "peak": [None if test.peak is None else round(test.peak / (1 << 30), 4) for test in tests],
        "start": [round(test.span.start, 3) for test in tests],
    }
