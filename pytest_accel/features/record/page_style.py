"""Colours and style sheets of the report page (``--accel-report``), for light and dark surroundings.

Bokeh draws a plot with the values of CSS variables such as ``--bk-major-label-text-color``, if there are any.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_accel.features.record.timeline import StepKind, Verdict

COLOURS: dict[Verdict, str] = {
    "failed": "#d55e00",
    "error": "#cc79a7",
    "unfinished": "#7b6fd0",
    "rerun": "#56b4e9",
    "xpassed": "#e69f00",
    "passed": "#009e73",
    "xfailed": "#8a9ba8",
    "skipped": "#a0a0a0",
}
"""Colours that colour-blind people can tell apart (Okabe and Ito), with contrast to white and to black.

Verdicts that a reader looks for come first: this is the order of rows in the table of tests.
"""
WAIT_COLOUR = "#8c8c8c"
WAIT_HATCH = f"repeating-linear-gradient(-45deg, {WAIT_COLOUR} 0 2px, transparent 2px 4px)"
START_COLOUR = "#0072b2"
STEP_COLOURS: dict[StepKind, str] = {
    "test": "#009e73",
    "wait": "#e69f00",
    "ranks": START_COLOUR,
    "other": "#8a9ba8",
}

PAGE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f6f8fa; --ink: #1f2328; --muted: #59636e; --line: #d1d9e0; --accent: #0969da;
  --chosen: #dbeafe;
  --bk-background-fill-color: #ffffff; --bk-border-fill-color: #ffffff;
  --bk-major-label-text-color: #59636e; --bk-axis-label-text-color: #59636e; --bk-text-color: #1f2328;
  --bk-grid-line-color: #e4e8ec; --bk-axis-line-color: #d1d9e0; --bk-major-tick-line-color: #d1d9e0;
  --bk-outline-line-color: #d1d9e0;
  --bokeh-base-font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --bokeh-mono-font: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  --bokeh-font-size: 13px;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --panel: #161b22; --ink: #e6edf3; --muted: #9198a1; --line: #30363d; --accent: #58a6ff;
    --chosen: #1f3a5f;
    --bk-background-fill-color: #0d1117; --bk-border-fill-color: #0d1117;
    --bk-major-label-text-color: #9198a1; --bk-axis-label-text-color: #9198a1; --bk-text-color: #e6edf3;
    --bk-grid-line-color: #21262d; --bk-axis-line-color: #30363d; --bk-major-tick-line-color: #30363d;
    --bk-outline-line-color: #30363d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 20px 24px 40px; max-width: 1600px; background: var(--page); color: var(--ink);
  font: 14px/1.5 var(--bokeh-base-font); overflow-wrap: anywhere;
}
h1 { font-size: 22px; line-height: 1.25; margin: 0 0 12px; }
h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 0 0 8px; }
.muted { color: var(--muted); }
code { font-family: var(--bokeh-mono-font); font-size: 12.5px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--muted); font-size: 12px; }
th, td { padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; white-space: nowrap; width: 1%; }
.sessions { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px; }
.session { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.session p:last-child { margin: 0; }
.session .counts { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 18px; font-weight: 600; margin: 0 0 6px; }
.counts span { white-space: nowrap; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.killed { color: #d55e00; font-weight: 600; }
.scroll { overflow: auto; }
.steps { max-height: 420px; }
.bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 4px 0 8px; }
.key { display: flex; flex-wrap: wrap; gap: 0 16px; }
summary { cursor: pointer; color: var(--accent); }
.bk-Tooltip {
  background-color: var(--panel) !important; color: var(--ink) !important; border-color: var(--line) !important;
  opacity: 1 !important; border-radius: 6px; padding: 8px 10px !important;
  box-shadow: 0 4px 16px rgb(0 0 0 / 25%); max-width: min(440px, 80vw); overflow-wrap: anywhere;
}
@media (max-width: 600px) { body { padding: 14px 12px 40px; } }
"""

WIDGETS = """
:host { --color: var(--ink); --background-color: var(--page); --border-color: var(--line); color: var(--ink); }
.bk-input { background-color: var(--page); color: var(--ink); border-color: var(--line); font-size: 13px; }
.bk-input-group > label { color: var(--muted); }
"""

TABLE = """
:host { --color: var(--ink); --odd: var(--page); --special: var(--page); --selected: var(--chosen); }
.bk-data-table { background: var(--page); color: var(--ink); font-variant-numeric: tabular-nums; }
.slick-header, .slick-header.ui-state-default { border-bottom: 1px solid var(--line) !important; }
.slick-header-column.ui-state-default {
  background: var(--panel); color: var(--muted); border-right-color: transparent !important; font-weight: 600;
  height: 20px; line-height: 20px; padding: 4px 6px; cursor: pointer;
}
.slick-row, .slick-row.odd { background: var(--page); color: var(--ink); }
.slick-row:hover { background: var(--panel); cursor: pointer; }
.slick-cell { border: 0; border-bottom: 1px solid var(--line); padding: 3px 6px; cursor: inherit; }
.slick-cell.selected { background-color: var(--chosen); }
.slick-cell.active { border-style: solid; }
.slick-sort-indicator { background: none !important; float: right; width: auto; height: auto; margin: 0; }
.slick-sort-indicator-asc::after { content: "▲"; font-size: 9px; }
.slick-sort-indicator-desc::after { content: "▼"; font-size: 9px; }
"""

DETAILS = """
:host {
  position: fixed !important; z-index: 20; left: 0; right: 0; bottom: 0; width: 100% !important; max-height: 48vh;
  overflow: auto; background: var(--panel); border-top: 1px solid var(--line); box-shadow: 0 -6px 24px rgb(0 0 0 / 20%);
}
"""

DETAILS_TEXT = """
:host { color: var(--ink); overflow-wrap: anywhere; font-size: 13px; }
.bk-clearfix { width: 100%; padding: 4px max(24px, calc(50vw - 776px)) 16px; }
h3 { font-size: 15px; margin: 0 48px 6px 0; }
h4 { font-size: 12px; margin: 12px 0 4px; color: var(--muted); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; }
dt { color: var(--muted); }
dd { margin: 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 2px 16px 2px 0; white-space: nowrap; }
.scroll { overflow-x: auto; }
th { color: var(--muted); font-weight: 400; }
.bad { color: #d55e00; font-weight: 600; }
pre {
  margin: 0; padding: 8px 10px; background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere;
}
@media (max-width: 600px) {
  .bk-clearfix { padding: 4px 12px 16px; }
  dl { gap: 2px 10px; }
}
"""

CLOSE = """
:host { position: sticky !important; top: 8px; float: right; z-index: 1; align-self: flex-end; margin: 0 12px; }
.bk-btn { background: var(--page); color: var(--ink); border: 1px solid var(--line); }
"""

_LEGEND = """
.bk-btn-group { display: flex; flex-wrap: wrap; gap: 4px; }
.bk-btn-group .bk-btn {
  display: flex; align-items: center; gap: 6px; flex: none; min-width: 0; padding: 2px 8px;
  border: 1px solid transparent; border-radius: 6px; background: none; box-shadow: none; color: var(--muted);
  text-decoration: line-through;
}
.bk-btn-group .bk-btn.bk-active { color: var(--ink); background: none; box-shadow: none; text-decoration: none; }
.bk-btn-group .bk-btn:hover { border-color: var(--line); }
.bk-btn-group .bk-btn::before { content: ""; width: 12px; height: 12px; border-radius: 2px; opacity: 0.3; }
.bk-btn-group .bk-btn.bk-active::before { opacity: 1; }
"""


def legend(backgrounds: Sequence[str]) -> str:
    """Return the style sheet of a group of buttons, each with a sample of its kind of bars."""
    samples = (
        f".bk-btn-group .bk-btn:nth-child({number})::before {{ background: {background}; }}"
        for number, background in enumerate(backgrounds, 1)
    )
    return "\n".join([_LEGEND, *samples])
