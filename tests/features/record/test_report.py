"""Tests of the report page: it agrees with the record, and loads nothing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_accel.__main__ import main
from tests.features.record.conftest import Recorded, ran, write_events

_INJECTION = "</script></style></details><img src=x onerror=alert(1)/>"
"""Text that a page would execute if it did not escape it."""


class Page:
    """A page, which is also well-formed XML. It has no script, and names no other file."""

    def __init__(self, path: Path) -> None:
        self.root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert {one.tag for one in self.root.iter()}.isdisjoint({"script", "img", "iframe", "object"})
        names = [one.get("href", "") for one in self.root.iter()]
        assert all(name.startswith(("#", "data:")) for name in names if name)

    def rows(self, title: str) -> list[list[str]]:
        """Return the texts of the cells of each row of the table below a title, without its head."""
        titles = [one.text for one in self.root.findall("body/h3")]
        rows = self.root.findall("body/table")[titles.index(title)].findall("tr")
        return [
            ["".join(cell.itertext()).strip() for cell in row.findall("td")]
            for row in rows
            if row.find("td") is not None
        ]

    def text(self, place: str) -> str:
        """Return the text of all elements that `place` denotes."""
        return "\n".join("".join(one.itertext()) for one in self.root.findall(place))


def test_the_page_agrees_with_the_session(two_workers: Recorded) -> None:
    session = two_workers.session
    assert f"accel: report of the session: {two_workers.folder / 'report.html'}" in two_workers.text
    page = Page(two_workers.folder / "report.html")
    counts = Counter(test.verdict for test in session.tests)
    shown = (one.split() for one in page.text("body/h2").removeprefix("pytest-accel: ").split(", "))
    assert {verdict: int(number) for number, verdict in shown} == counts
    rows = page.rows("Tests")
    runs = {test.test: test for test in session.tests}
    assert [row[0] for row in rows[:3]] == ["failed", "failed", "error"]
    assert Counter(row[1].partition("\n")[0] for row in rows) == Counter(list(runs))
    for verdict, about, seconds, wait, used, *_ in rows:
        test = runs[about.partition("\n")[0]]
        assert verdict == test.verdict
        times = test.span.seconds, test.waited, test.device_seconds
        assert tuple(map(float, (seconds, wait, used))) == pytest.approx(times, abs=0.006)
    # Each row of these tables is tested with the summary.
    assert page.rows("Skipped for missing hardware (1)") == [["needs 9 sim devices; there are 4: 4 x sim", "1"]]
    assert [row[1:4] for row in page.rows("Devices")] == [["sim", "4", "4 x sim"]]

    failed = next(row[1] for row in rows if row[1].startswith("sub/test_it.py::test_one_rank_fails"))
    for text in ("rank 1: assert 1 == 0", "call failed, rank 1, sub/test_it.py:", "assert rank == 0", "hello from 1"):
        assert text in failed
    assert re.search(r"setup passed.*rank 1: passed [\d.]+ s.*call failed.*rank 1: failed [\d.]+ s", failed, re.DOTALL)


def test_text_of_a_record_is_escaped(tmp_path: Path) -> None:
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
    page = Page(tmp_path / "report.html")
    assert page.rows("Longest waits") == [["2.0", f"why {text}"]]
    details = page.rows("Tests")[0]
    for part in (f"headline {text}", f"output {text}", f"section {text}", f"failure {text}"):
        assert part in details[1]
    assert details[-1] == f"rank {text}: 1 GiB"
    assert page.rows("Skipped for missing hardware (1)") == [[f"missing {text}", "1"]]
    assert page.rows("Skipped for other reasons (1)") == [[f"skip {text}", "1"]]
    assert "killed: the record has no end of the session" in page.text("body/p")
