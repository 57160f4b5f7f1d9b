"""Colours and the style sheet of the report page (``--accel-report``), for light and dark surroundings.

Bokeh draws a plot with the values of CSS variables such as ``--bk-major-label-text-color``, if there are any. All texts
have at least the contrast of WCAG 2, level AA, to each background on which they may be.
"""

from __future__ import annotations

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
"""Colours of areas that colour-blind people can tell apart (Okabe and Ito). Those of words are in `PAGE`.

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
  --chosen: #e6f0fe;
  --failed: #b14a00; --error: #a8447d; --unfinished: #5b4fc0; --rerun: #0b6ea8; --xpassed: #8a5a00; --passed: #007352;
  --xfailed: #55656f; --skipped: #5f6368;
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
    --chosen: #1b3350;
    --failed: #ff8a3d; --error: #e29cc4; --unfinished: #a79eff; --rerun: #79c8f5; --xpassed: #f0b429;
    --passed: #3fcf9f; --xfailed: #a9b8c3; --skipped: #b4b4b4;
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
.path td:nth-child(3) { white-space: nowrap; width: 1%; }
button, input, select {
  font: inherit; color: var(--ink); background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  padding: 6px 10px; min-height: 36px;
}
button { cursor: pointer; }
::placeholder { color: var(--muted); opacity: 1; }
input, select { border-color: var(--muted); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
.filters { display: flex; flex-wrap: wrap; gap: 8px 12px; align-items: end; margin: 0 0 8px; }
.filters label { display: grid; gap: 2px; color: var(--muted); font-size: 13px; }
.filters output { padding: 7px 0; }
#part { width: 260px; max-width: 100%; }
#tests th { padding: 0; background: var(--panel); }
#tests th button {
  width: 100%; padding: 4px 12px 4px 6px; border: 0; border-radius: 0; background: none; color: var(--muted);
  font-weight: 600; text-align: inherit; white-space: nowrap;
}
#tests th[aria-sort=ascending] button::after { content: " ▲"; font-size: 9px; }
#tests th[aria-sort=descending] button::after { content: " ▼"; font-size: 9px; }
#tests td { padding: 5px 12px 5px 6px; }
#tests tbody tr { cursor: pointer; }
#tests tbody tr:hover { background: var(--panel); }
#tests tbody tr.chosen { background: var(--chosen); }
#tests td:first-child { white-space: nowrap; width: 1%; }
#tests td.devices { min-width: 140px; max-width: 260px; }
#tests td.devices span { white-space: nowrap; }
#tests td.name { min-width: 180px; }
td.name button {
  border: 0; padding: 0; min-height: 0; background: none; text-align: left; overflow-wrap: anywhere; width: 100%;
}
.passed, .failed, .error, .skipped, .xfailed, .xpassed, .rerun, .unfinished { font-weight: 600; }
.passed { color: var(--passed); }
.failed { color: var(--failed); }
.error { color: var(--error); }
.skipped { color: var(--skipped); }
.xfailed { color: var(--xfailed); }
.xpassed { color: var(--xpassed); }
.rerun { color: var(--rerun); }
.unfinished { color: var(--unfinished); }
.sessions { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px; }
.session { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.session p:last-child { margin: 0; }
.session .counts { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 18px; font-weight: 600; margin: 0 0 6px; }
.counts span { white-space: nowrap; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.killed, .bad { color: var(--failed); font-weight: 600; }
.scroll { overflow: auto; }
.steps { max-height: 420px; }
.bar { display: flex; height: 14px; border-radius: 4px; overflow: hidden; margin: 4px 0 8px; }
.key { display: flex; flex-wrap: wrap; gap: 0 16px; }
summary { cursor: pointer; color: var(--accent); padding: 6px 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px; }
.legend button {
  display: flex; align-items: center; gap: 6px; padding: 2px 8px; border-color: transparent; background: none;
}
.legend button:hover { border-color: var(--line); }
.legend i { width: 12px; height: 12px; border-radius: 2px; }
.legend [aria-pressed=false] { color: var(--muted); text-decoration: line-through; }
.legend [aria-pressed=false] i { opacity: 0.3; }
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
#details dt { color: var(--muted); }
#details dd { margin: 0; }
#details table { width: auto; }
#details th, #details td { border: 0; padding: 2px 16px 2px 0; white-space: nowrap; font-size: 13px; font-weight: 400; }
#details td .bad { font-weight: 600; }
#details pre {
  margin: 0; padding: 8px 10px; background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  font: 12px/1.5 var(--bokeh-mono-font); white-space: pre-wrap;
}
.bk-Tooltip {
  background-color: var(--panel) !important; color: var(--ink) !important; border-color: var(--line) !important;
  opacity: 1 !important; border-radius: 6px; padding: 8px 10px !important;
  box-shadow: 0 4px 16px rgb(0 0 0 / 25%); max-width: min(440px, 80vw); overflow-wrap: anywhere;
}
@media (max-width: 1100px) { #tests .wide { display: none; } }
@media (max-width: 600px) {
  body { padding: 14px 12px 40px; }
  #part { width: 100%; }
  .filters label:has(#part) { flex: 1 1 100%; }
  .filters select { min-height: 44px; }
  input, button { min-height: 44px; }
  #tests td { vertical-align: middle; }
  td.name button { min-height: 34px; }
  #tests .devices { display: none; }
  #details { padding: 4px 12px 16px; max-height: 60vh; }
  body:has(#details:not([hidden])) { padding-bottom: calc(60vh + 40px); }
  #details dl { gap: 2px 10px; }
  #details th, #details td { white-space: normal; }
}
"""
