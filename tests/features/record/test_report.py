"""Tests of the report page in a real browser: it agrees with the record, and makes no network requests."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_accel.__main__ import main
from pytest_accel.features.record.page_style import COLOURS, PAGE
from tests.features.conftest import Suite
from tests.features.record.conftest import Recorded, ran, write_events

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest.importorskip("bokeh")

_INJECTION = "</script></style><img src=x onerror=alert(1)>$$x^2$$"
"""Text that a page would execute or typeset if it did not escape it."""
_SIZES = ((1280, 900), (390, 844))
_ROWS = "#tests tbody tr"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Provide a headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            env=dict(os.environ),
            timeout=120_000,
        )
        yield started
        started.close()


@contextmanager
def _open_page(
    browser: Browser, path: Path, size: tuple[int, int] = _SIZES[0], scheme: Any = "light"
) -> Iterator[Page]:
    """Yield the page in the file `path`; then check that it requested nothing else, and had no error or dialog."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    problems: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: None if message.type in ("log", "info") else problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog {dialog.message}"))
    page.on("request", lambda request: requests.append(request.url))
    page.set_default_timeout(120_000)
    page.goto(path.as_uri())
    page.wait_for_function("!document.getElementById('tests') || accel.tests !== null")
    page.wait_for_function("!window.Bokeh || (Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle)")
    try:
        yield page
        assert problems == []
        assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
    finally:
        page.close()


def _bars(page: Page) -> dict[str, list[Any]]:
    """Return the columns of data of the bars in the page."""
    found = page.evaluate(
        "() => Object.fromEntries(Object.entries(accel.bars().data).map(([key, column]) => [key, Array.from(column)]))"
    )
    assert isinstance(found, dict)
    return found


def _tests(page: Page) -> dict[str, list[Any]]:
    """Return the columns of the table of tests in the page."""
    found = page.evaluate("accel.tests")
    assert isinstance(found, dict)
    return found


def _bar_center(page: Page, test: str) -> tuple[float, float]:
    """Return the coordinates of the center of a bar of `test`."""
    x, y = page.evaluate(
        """test => {
            const plot = Bokeh.documents[0].get_model_by_name("timeline")
            const view = Bokeh.index.find_one(plot)
            const bars = accel.bars().data
            const bar = bars.n.findIndex((n, bar) => accel.tests.test[n] === test && bars.kind[bar] < 8)
            view.el.scrollIntoView({block: "center"})
            const box = view.canvas_view.el.getBoundingClientRect()
            return [
              box.x + view.frame.x_scale.compute((bars.left[bar] + bars.right[bar]) / 2),
              box.y + view.frame.y_scale.compute((bars.top[bar] + bars.bottom[bar]) / 2),
            ]
        }""",
        test,
    )
    return float(x), float(y)


def _counts(page: Page) -> Counter[str]:
    """Return the numbers of tests by verdict at the top of the page, summed over all sessions."""
    counts: Counter[str] = Counter()
    for text in page.locator(".counts span").all_inner_texts():
        number, verdict = text.split()
        counts[verdict] += int(number)
    return counts


def _column(page: Page, number: int) -> list[str]:
    """Return the texts in a column of the table, from top to bottom."""
    return page.locator(f"{_ROWS} td:nth-child({number + 1})").all_inner_texts()


def test_the_page_agrees_with_the_session(two_workers: Recorded, browser: Browser) -> None:
    session = two_workers.session
    assert f"accel: report of the session: {two_workers.folder / 'report.html'}" in two_workers.text
    with _open_page(browser, two_workers.folder / "report.html") as page:
        counts = _counts(page)
        assert counts == Counter(test.verdict for test in session.tests)
        table = _tests(page)
        runs = {test.test: test for test in session.tests}
        assert Counter(table["test"]) == Counter(list(runs))
        for name, verdict, seconds, wait, used in zip(
            *(table[column] for column in ("test", "verdict", "seconds", "wait", "device_seconds")), strict=True
        ):
            test = runs[name]
            assert verdict == test.verdict
            assert (seconds, wait, used) == pytest.approx(
                (test.span.seconds, test.waited, test.device_seconds), abs=1e-4
            )
        bars = _bars(page)
        on_lanes = Counter(table["test"][n] for n, kind in zip(bars["n"], bars["kind"], strict=True) if kind < 8)
        assert on_lanes == {test.test: len(test.lanes) for test in session.tests if test.lanes}
        assert bars["kind"].count(9) == sum(
            len(test.lanes) for test in session.tests if test.wait is not None and test.wait.starts_world
        )
        skips = page.locator("#skips td:nth-child(2)").all_inner_texts()
        others = ["of its own accord", "not for want of hardware"]
        assert skips == ["needs 9 sim devices; there are 4: 4 x sim (missing hardware)", *others]
        assert "of 4 devices in use on average while tests ran" in page.locator(".session").inner_text()


@pytest.mark.long
def test_a_user_can_explore_the_page(two_workers: Recorded, browser: Browser) -> None:
    with _open_page(browser, two_workers.folder / "report.html", (1280, 1400)) as page:
        _check_details(page)
        _check_table(page)


def _check_details(page: Page) -> None:
    """Check that a click on a row or a bar shows the details of its test, which can be closed."""
    page.locator(_ROWS, has_text="test_one_rank_fails").click()
    details = page.locator("#details", has_text="sub/test_it.py::test_one_rank_fails")
    details.get_by_text("rank 1: assert 1 == 0", exact=True).wait_for()
    text = details.inner_text()
    assert "call failed, rank 1, sub/test_it.py:" in text
    assert "assert rank == 0" in text
    assert "hello from 1" in text
    assert re.search(r"rank 1\s+passed [\d.]+ s\s+failed [\d.]+ s", text)
    page.get_by_role("button", name="Close").click()
    details.wait_for(state="hidden")

    page.mouse.click(*_bar_center(page, "sub/test_it.py::test_one_rank_ends"))
    details = page.locator("#details", has_text="sub/test_it.py::test_one_rank_ends")
    details.get_by_text("rank 1 exited with status 3").first.wait_for()
    assert page.locator(f"{_ROWS}.chosen .name").all_inner_texts() == ["sub/test_it.py::test_one_rank_ends"]
    page.keyboard.press("Escape")
    details.wait_for(state="hidden")

    # The keyboard reaches each test, and comes back to it.
    page.get_by_role("button", name="sub/test_it.py::test_errs").focus()
    page.keyboard.press("Enter")
    page.locator("#details", has_text="RuntimeError: no fixture").wait_for()
    assert page.evaluate("document.activeElement.id") == "close"
    page.keyboard.press("Enter")
    details.wait_for(state="hidden")
    assert page.evaluate("document.activeElement.textContent") == "sub/test_it.py::test_errs"


def _check_table(page: Page) -> None:
    """Check that the table can be filtered by name and by verdict, and sorted."""
    verdicts = _tests(page)["verdict"]
    assert verdicts[:3] == ["failed", "failed", "error"]
    page.get_by_placeholder("part of its name").press_sequentially("RANKS[")
    page.get_by_text(f"3 of {len(verdicts)} tests").wait_for()
    assert sorted(_column(page, 1)) == [f"sub/test_it.py::test_ranks[{number}]" for number in range(3)]
    page.get_by_placeholder("part of its name").fill("")
    page.locator("select").select_option("error")
    page.get_by_text(f"1 of {len(verdicts)} tests").wait_for()
    assert _column(page, 1) == ["sub/test_it.py::test_errs"]
    page.locator("select").select_option("all")
    page.get_by_text(f"{len(verdicts)} of {len(verdicts)} tests").wait_for()
    header = page.locator("#tests [data-key=test]")
    for reverse in (False, True):
        header.click()
        assert _column(page, 1) == sorted(_tests(page)["test"], reverse=reverse)


def test_the_colours_of_any_two_verdicts_differ() -> None:
    words: dict[str, list[str]] = {}
    for name, colour in re.findall(r"--(\w+): (#[0-9a-f]{6})", PAGE):
        words.setdefault(name, []).append(colour)
    light, dark = ({verdict: words[verdict][scheme] for verdict in COLOURS} for scheme in (0, 1))
    for colours in (COLOURS, light, dark):
        for one, other in itertools.combinations(colours, 2):
            parts = [bytes.fromhex(colours[name][1:]) for name in (one, other)]
            assert math.dist(*parts) >= 40, f"{one} {colours[one]} looks like {other} {colours[other]}"


@pytest.mark.long
def test_text_of_a_record_is_escaped(tmp_path: Path, browser: Browser) -> None:
    text, at = _INJECTION, 1_790_000_000.0
    test = f"test_it.py::test_it[{text}]"
    failed = {
        "file": text,
        "world": 1,
        "headline": f"headline {text}",
        "failure": f"failure {text}",
        "place": (text, 1),
        "ranks": [{"rank": 0, "ending": text, "start": at + 5, "stop": at + 6}],
        "failed_ranks": [0],
        "output": {f"section {text}": f"output {text}"},
        "peaks": {text: 1 << 30},
    }
    write_events(
        tmp_path / "record.jsonl",
        (at, "DeviceFound", {"device": text, "kind": text, "name": text}),
        (at + 2, "WorldRequested", {"request": 1, "test": test, "about": text}),
        (at + 2, "RequestWaits", {"request": 1, "why": f"why {text}"}),
        (at + 4, "WorldStarting", {"world": 1, "request": 1, "about": text, "places": [{"devices": [text]}]}),
        (at + 4, "WorldAcquired", {"world": 1, "request": 1}),
        *ran(test, "failed", at + 5, at + 6, **failed),
        *ran(f"test_skip[{text}]", "skipped", at + 6, skip=f"skip {text}"),
        *ran(f"test_missing[{text}]", "skipped", at + 6, skip="", missing=f"missing {text}"),
        (at + 7, "TestStarted", {"test": f"test_running[{text}]"}),
        at=at,
        session=text,
        version=text,
        command=[text],
        root=text,
    )
    assert main(["report", str(tmp_path / "record.jsonl"), "-o", str(tmp_path / "report.html")]) == 0
    with _open_page(browser, tmp_path / "report.html", (1280, 1600)) as page:
        page.mouse.move(*_bar_center(page, test))
        tooltip = page.locator(".bk-tooltip-content", has_text=test)
        tooltip.wait_for()
        assert "failed, ran 1.00 s, waited 2.00 s, started 2026-09-21 " in tooltip.inner_text()
        page.locator(_ROWS, has_text="test_it.py").click()
        details = page.locator("#details", has_text=test)
        details.get_by_text(f"failure {text}", exact=True).wait_for()
        shown = details.inner_text()
        for part in (f"headline {text}", f"why {text}", f"output {text}", f"section {text}", f"rank {text}: 1 GiB"):
            assert part in shown
        skips = page.locator("#skips").inner_text()
        assert f"missing {text} (missing hardware)" in skips
        assert f"skip {text}" in skips
        assert "killed: the record has no end of the session" in page.locator(".session").inner_text()
        assert _counts(page) == {"failed": 1, "unfinished": 1, "skipped": 2}
        assert page.locator("img").count() == 0


@pytest.mark.long
def test_the_page_of_a_session_without_marked_tests_says_so(suite: Suite, browser: Browser) -> None:
    suite.write("test_it.py", "def test_plain(): pass\n")
    suite.run("--accel-report=report.html")
    with _open_page(browser, suite.path / "report.html") as page:
        assert page.get_by_text("No test ran in ranks.").is_visible()
        assert _column(page, 1) == ["test_it.py::test_plain"]
        assert _column(page, 6) == [""]


def test_a_report_without_bokeh_is_a_usage_error(suite: Suite) -> None:
    suite.write("without_bokeh.py", "import sys\nsys.modules['bokeh'] = None\n")
    suite.write("test_it.py", "def test_plain(): pass\n")
    run = suite.run("-p", "without_bokeh", "--accel-report=report.html", "--accel-record=record.jsonl")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --accel-report: Bokeh is not installed: pip install 'pytest-accel[report]'" in run.errors
