"""The page of ``--accel-report`` for 5,000 tests on 64 devices: its size, and the time in which Chromium opens it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from benchmarks.large_record import write_record
from benchmarks.measure import Effort, Figure, middle
from pytest_accel import read_record
from pytest_accel.features.record.timeline import sessions_of

_TESTS = 5_000
_DEVICES = 64
_SIZE = 4.0  # MB
_OPENING = 1.5  # seconds


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the time to make the page, its size, and the time to open it in several runs."""
    from pytest_accel.features.record.report_page import page

    folder.mkdir()
    write_record(folder / "record.jsonl", _TESTS, _DEVICES)
    sessions = sessions_of([read_record(folder / "record.jsonl")])
    began = time.perf_counter()
    text = page(sessions)
    made = time.perf_counter() - began
    file = folder / "report.html"
    file.write_text(text, encoding="utf-8")
    name = f"page of {_TESTS:,} tests"
    return [
        Figure(f"{name}: making", made, "s"),
        Figure(f"{name}: size", file.stat().st_size / 1e6, "MB", _SIZE, f"{_SIZE:g} MB"),
        *_opening(file, name, effort),
    ]


def _opening(file: Path, name: str, effort: Effort) -> list[Figure]:
    """Return the seconds until Bokeh has drawn everything, and the CPU time of the page's thread until then."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        return [Figure(f"{name}: opening", float("nan"), "s", note="needs Chromium and playwright")]
    times, cpu = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(effort.runs + 1):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(300_000)
            page.add_init_script(
                """addEventListener("DOMContentLoaded", () => {
                    const look = () => {
                        if (window.Bokeh?.documents[0]?.is_idle) window.opened = performance.now()
                        else requestAnimationFrame(look)
                    }
                    look()
                })"""
            )
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            page.goto(file.as_uri())
            page.wait_for_function("window.opened")
            times.append(page.evaluate("window.opened") / 1000)
            metrics = session.send("Performance.getMetrics")["metrics"]
            cpu += [one["value"] for one in metrics if one["name"] == "TaskDuration"]
            page.close()
        browser.close()
    # The first page also starts the browser's processes.
    opened, used = tuple(times[1:]), tuple(cpu[1:])
    return [
        Figure(f"{name}: opening", middle(opened), "s", _OPENING, f"{_OPENING:g} s", opened),
        Figure(f"{name}: CPU time of its thread", middle(used), "s", values=used),
    ]
