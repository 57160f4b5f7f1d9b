"""Tests of the summary in GitHub Actions, and of ``python -m pytest_accel summary``."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_accel.__main__ import main
from tests.features.conftest import Suite
from tests.features.record.conftest import Recorded, Written, ran, write_events
from tests.run import Run

_PASSING_TEST = """
    import pytest

    @pytest.mark.devices
    def test_it(): pass
"""


@pytest.fixture
def summary(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make sessions of the suite jobs of GitHub Actions, and provide the file of their summary."""
    suite.without_torch()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(suite.path / "step-summary.md"))
    return suite.path / "step-summary.md"


def _run(suite: Suite, *options: str) -> Run:
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # It marks a session that a test has started.
    return suite.run(*options)


@pytest.mark.parametrize("name", ["no_xdist", "two_workers"])
def test_a_job_gets_a_summary(request: pytest.FixtureRequest, name: str) -> None:
    recorded: Recorded = request.getfixturevalue(name)
    earlier, _, text = (recorded.folder / "summary.md").read_text(encoding="utf-8").partition("\n\n")
    assert earlier == "An earlier step."
    assert text.startswith("<h2>pytest-accel: 2 failed, 1 error, 8 passed, 3 skipped, 3 xfailed, 1 xpassed</h2>\n")
    line = recorded.line("assert rank == 0")
    place, cause = f"sub/test_it.py:{line}", "rank 1: assert 1 == 0"
    assert ["rank 1", place, cause] in [row[1:] for row in _table(text, "Failures (3)")]
    assert _table(text, "Skipped for missing hardware (1)") == [["needs 9 sim devices; there are 4: 4 x sim", "1"]]
    assert ["of its own accord", "1"] in _table(text, "Skipped for other reasons (2)")
    assert _table(text, "Devices")[0][1:4] == ["sim", "4", "4 x sim"]


_PLACES = '''
    import json

    import pytest

    def parse(): exec("json.loads('')", {"json": json})

    @pytest.mark.distributed(2, init=False)
    def test_ranks(): parse()

    def test_plain(): parse()

    def double(number):
        """
        >>> double(3)
        7
        """
        return 2 * number
    '''


def test_failures_in_libraries_and_doctests_have_a_place_and_a_cause(suite: Suite, summary: Path) -> None:
    lines = suite.write("test_it.py", _PLACES).read_text().splitlines()
    _run(suite, "--doctest-modules", "--tb=line")
    error = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert sorted(_table(summary.read_text(), "Failures (3)")) == sorted(
        [f"test_it.py::{test}", ranks, f"test_it.py:{number}", cause]
        for number, line in enumerate(lines, 1)
        for place, test, ranks, cause in (
            (">>> double(3)", "test_it.double", "", f"{suite.path}/test_it.py:{number}: DocTestFailure"),
            ("def parse", "test_plain", "", error),
            ("def parse", "test_ranks", "ranks 0-1", f"ranks 0-1: {error}"),
        )
        if place in line
    )


def test_only_the_session_of_a_job_that_has_marked_tests_writes_a_summary(suite: Suite, summary: Path) -> None:
    suite.write("test_plain.py", "def test_plain():\n    pass\n")
    suite.write("inner/test_inner.py", _PASSING_TEST)
    suite.write(
        "test_it.py",
        """
        import subprocess
        import sys

        import pytest

        @pytest.mark.devices
        def test_it():
            command = [sys.executable, "-m", "pytest", "-p", "accel", "--accel=sim:1", "inner/test_inner.py"]
            assert subprocess.run(command).returncode == 0
        """,
    )
    assert _run(suite, "test_plain.py").ret == 0
    assert not summary.exists()
    assert _run(suite, "--accel=none", "inner").ret == 0
    assert summary.read_text(encoding="utf-8").startswith("\n\n<h2>pytest-accel: 1 skipped</h2>\n")
    assert _run(suite, "test_it.py").ret == 0
    assert summary.read_text(encoding="utf-8").count("<h2>pytest-accel") == 2


def test_a_summary_that_cannot_be_written_fails_no_session(suite: Suite, summary: Path) -> None:
    suite.write("test_it.py", _PASSING_TEST)
    summary.write_bytes(b"x" * ((1 << 20) - 50))
    run = _run(suite)
    assert run.ret == 0
    assert re.search(r"^accel: the job summary \S+ has no room for this session", run.text, re.MULTILINE)


_EVIL = "a\n</td> | <b> `c` *d* [e](f) ::error:: @g #1 \x1b[0Ksection_end:1:s\r \udce9 \u202e"
_SHOWN = r"a </td> | <b> `c` *d* [e](f) ::error:: @g #1 \x1b[0Ksection_end:1:s ? \u202e"


def _parsed(text: str) -> ElementTree.Element:
    """Return the elements of a summary. It has no empty line, after which Markdown would be interpreted."""
    assert "\n\n" not in text.strip()
    return ElementTree.fromstring(f"<div>{text}</div>")


def _table(text: str, title: str) -> list[list[str]]:
    """Return the cells of a table as a browser shows them."""
    elements = list(_parsed(text))
    (table,) = (after for one, after in pairwise(elements) if one.tag == "h3" and one.text == title)
    return [["".join(cell.itertext()) for cell in row] for row in table.findall("tr")[1:]]


def _summary(tmp_path: Path, *sessions: list[Written]) -> str:
    """Return the summary of sessions with these events, on a machine with an evil name."""
    of_host = [[(at, name, fields | {"host": _EVIL}) for at, name, fields in events] for events in sessions]
    records = [write_events(tmp_path / f"{n}.jsonl", *events, host=_EVIL) for n, events in enumerate(of_host)]
    assert main(["summary", *records, "-o", str(tmp_path / "out" / "summary.md")]) == 0
    return (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")


def test_text_cannot_inject_markup_or_commands(tmp_path: Path) -> None:
    text = _summary(
        tmp_path,
        [
            *ran(f"test_it[{_EVIL}]", "failed", 2.0, headline=_EVIL),
            *ran("test_first", "failed", 1.0, headline="first"),
            *ran("test_skip", "skipped", 1.0, skip=_EVIL),
            (2.0, "SessionFinished", {"status": 1}),
        ],
        [(3.0, "TestStarted", {"test": "test_killed"})],
        [(4.0, "SessionFinished", {"status": 4})],
    )
    assert text.startswith("<h2>pytest-accel: 2 failed, 1 unfinished, 1 skipped</h2>\n<p><code>a ")
    assert "killed: the record has no end of the session</p>\n" in text
    assert "exit status 4</p>\n" in text
    failures = ["", "", "first"], ["", "", _SHOWN], ["", "", "it was running when the session ended"]
    assert [row[1:] for row in _table(text, "Failures (3)")] == list(failures)
    assert _table(text, "Skipped for other reasons (1)") == [[_SHOWN, "1"]]
    elements = list(_parsed(text).iter())
    assert {one.tag for one in elements} == {"div", "h2", "h3", "p", "table", "tr", "th", "td", "code"}
    assert _SHOWN in [one.text for one in elements if one.tag == "code"]
    assert not set(text) & set("\x1b\r\u202e")


def test_a_summary_has_devices_and_waits_and_a_limited_size(tmp_path: Path) -> None:
    def run(test: str, world: int, start: float, stop: float) -> list[Written]:
        return [(start, "TestStarted", {"test": test}), *ran(test, "passed", start, stop, world=world)]

    text = _summary(
        tmp_path,
        [
            *((0.0, "DeviceFound", {"device": name, "kind": "cuda", "name": "L4"}) for name in ("a", "b")),
            (5.0, "WorldRequested", {"request": 1, "test": "test_one"}),
            (10.0, "WorldStarting", {"request": 1, "world": 2, "places": [{"devices": ["a"]}]}),
            *run("test_one", 2, 10.0, 20.0),
            (20.0, "WorldRequested", {"request": 3, "test": "test_two"}),
            (20.0, "RequestWaits", {"request": 3, "why": "test_two waits for 2 cuda devices"}),
            (23.0, "WorldStarting", {"request": 3, "world": 4, "places": [{"devices": ["a", "b"]}]}),
            *run("test_two", 4, 23.0, 33.0),
            (33.0, "WorldRequested", {"request": 5, "test": "test_in_vain"}),
            (33.0, "RequestWaits", {"request": 5, "why": "test_in_vain waits for 2 cuda devices"}),
            (40.0, "RequestEnded", {"request": 5, "why": "no devices came free"}),
            *run("test_in_vain", 0, 40.0, 40.0),
            *run("test_unmarked", 0, 40.0, 55.0),
            *run("test_beside_it", 0, 45.0, 60.0),
            *(one for n in range(200) for one in ran(f"test_é[{n}]", "skipped", 60.0, skip="é" * 500 + str(n))),
            *(one for n in range(200, 2000) for one in ran(f"test_é[{n}]", "failed", 60.0, headline="`" * 500)),
            (60.0, "SessionFinished", {"status": 1}),
        ],
    )
    # Tests ran in 10 + 10 + 20 of the 60 seconds; one device was in use for 20 of them and the other for 10.
    assert _table(text, "Devices")[0][1:] == ["cuda", "2", "2 x L4", "38"]
    assert _table(text, "Longest waits") == [
        ["7.0", "test_in_vain waits for 2 cuda devices"],
        ["3.0", "test_two waits for 2 cuda devices"],
    ]
    assert len(_table(text, "Failures (1800)")) == 50
    assert "\n<p>1750 more left out.</p>\n" in text
    assert len(text.encode()) < 1 << 20
