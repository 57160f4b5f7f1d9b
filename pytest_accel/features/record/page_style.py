"""Colours and the style sheet of the report page (``--accel-report``), for light and dark surroundings.

Bokeh draws a plot with the values of CSS variables such as ``--bk-major-label-text-color``, if there are any. All texts
have at least the contrast of WCAG 2, level AA, to each background on which they may be.
"""

from __future__ import annotations

from pytest_accel.features.record.timeline import Verdict

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
"""Colours of areas that colour-blind people can tell apart (Okabe and Ito). `PAGE` has the colours of words.

Verdicts that a reader looks for come first: this is the order of rows in the table of tests.
"""
WAIT_COLOUR = "#8c8c8c"
START_COLOUR = "#0072b2"

PAGE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --panel: #f6f8fa; --ink: #1f2328; --muted: #59636e; --line: #d1d9e0; --accent: #0969da;
  --chosen: #e6f0fe;
  --failed: #b14a00; --error: #a8447d; --unfinished: #5b4fc0; --rerun: #0b6ea8; --xpassed: #8a5a00; --passed: #007352;
  --xfailed: #6a5c22; --skipped: #5f6368;
  --bokeh-base-font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --bokeh-mono-font: ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace;
  --bokeh-font-size: 13px;
  --bk-background-fill-color: var(--page); --bk-border-fill-color: var(--page);
  --bk-major-label-text-color: var(--muted); --bk-axis-label-text-color: var(--muted); --bk-text-color: var(--ink);
  --bk-grid-line-color: var(--line); --bk-axis-line-color: var(--line); --bk-major-tick-line-color: var(--line);
  --bk-outline-line-color: var(--line);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --panel: #161b22; --ink: #e6edf3; --muted: #9198a1; --line: #30363d; --accent: #58a6ff;
    --chosen: #1b3350;
    --failed: #ff8a3d; --error: #e29cc4; --unfinished: #a79eff; --rerun: #79c8f5; --xpassed: #f0b429;
    --passed: #3fcf9f; --xfailed: #cbbf85; --skipped: #b4b4b4;
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
.number, .verdict { white-space: nowrap; width: 1%; }
.number { text-align: right; }
button, input, select {
  font: inherit; color: var(--ink); background: var(--page); border: 1px solid var(--muted); border-radius: 6px;
  padding: 6px 10px; min-height: 36px;
}
button { cursor: pointer; }
::placeholder { color: var(--muted); opacity: 1; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
.filters, .counts, .key { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: end; margin: 0 0 8px; }
.filters label { display: grid; gap: 2px; color: var(--muted); font-size: 13px; }
.filters output { padding: 7px 0; }
#part { width: 260px; max-width: 100%; }
#tests th { padding: 0; background: var(--panel); }
#tests button { border: 0; background: none; width: 100%; text-align: inherit; }
#tests th button { padding: 4px 12px 4px 6px; color: var(--muted); font-weight: 600; white-space: nowrap; }
#tests [aria-sort=ascending] button::after { content: " ▲"; font-size: 9px; }
#tests [aria-sort=descending] button::after { content: " ▼"; font-size: 9px; }
#tests td { padding: 5px 12px 5px 6px; vertical-align: middle; }
#tests td button { padding: 0; min-height: 24px; overflow-wrap: anywhere; }
#tests tbody tr { cursor: pointer; }
#tests tbody tr:hover { background: var(--panel); }
#tests tbody tr.chosen { background: var(--chosen); }
#tests td.devices { min-width: 140px; max-width: 260px; }
#tests td.name { min-width: 180px; }
#tests td.verdict { font-weight: 600; }
.sessions { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px; }
.session { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.counts { font-size: 18px; font-weight: 600; }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.killed, .bad { color: var(--failed); font-weight: 600; }
.scroll { overflow: auto; }
#details {
  position: fixed; z-index: 20; left: 0; right: 0; bottom: 0; max-height: 48vh; overflow: auto; font-size: 13px;
  background: var(--panel); border-top: 1px solid var(--line); box-shadow: 0 -6px 24px rgb(0 0 0 / 20%);
  padding: 4px max(24px, calc(50vw - 776px)) 16px;
}
body:has(#details:not([hidden])) { padding-bottom: calc(48vh + 40px); }
#close { position: sticky; top: 4px; float: right; margin-left: 12px; }
#details h3 { font-size: 15px; margin: 8px 0 6px; }
#details h4 { font-size: 12px; margin: 12px 0 4px; color: var(--muted); }
#details dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0; }
#details dd { margin: 0; }
#details table { width: auto; }
#details th, #details td { border: 0; padding: 2px 16px 2px 0; white-space: nowrap; font-size: 13px; font-weight: 400; }
#details pre {
  margin: 0; padding: 8px 10px; background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  font: 12px/1.5 var(--bokeh-mono-font); white-space: pre-wrap;
}
.bk-Tooltip {
  background-color: var(--panel) !important; color: var(--ink) !important; border-color: var(--line) !important;
  opacity: 1 !important; padding: 8px 10px !important; max-width: min(440px, 80vw); overflow-wrap: anywhere;
}
@media (max-width: 1100px) { #tests .wide { display: none; } }
@media (max-width: 600px) {
  body { padding: 14px 12px 40px; }
  #part { width: 100%; }
  .filters label:has(#part) { flex: 1 1 100%; }
  input, select, button { min-height: 44px; }
  #tests td button { min-height: 34px; }
  #tests .devices { display: none; }
  #details { padding: 4px 12px 16px; max-height: 60vh; }
}
"""
