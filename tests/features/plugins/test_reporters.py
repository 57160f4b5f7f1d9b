"""Tests of reporters: reports of marked and unmarked tests are equal, except for data that differs between ranks."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.features.plugins.conftest import Pair, needs
from tests.run import Run

_SUITE = """
    import logging
    import os

    import pytest
    from hypothesis import assume, given, seed, settings, target
    from hypothesis import strategies as st
    from pytest_bdd import given as given_step, parsers, scenario, then
    from pytest_html import extras as made

    LAST = os.environ.get("RANK", "1") == "1"
    in_ranks = pytest.mark.distributed(2, kind="cpu")

    @pytest.fixture
    def broken(): raise OSError("no such disk")

    @in_ranks
    @pytest.mark.parametrize("number", [1, "two"])
    def test_records(
        number, extras, json_metadata, record_property, record_xml_attribute, record_testsuite_property
    ):
        "Adds what it is given."
        print("said in the test")
        logging.getLogger("suite").warning("logged in the test")
        record_property("color", "red")
        record_xml_attribute("assertions", 7)
        record_testsuite_property("board", "b1")
        extras.append(made.text("words of the test", name="words"))
        json_metadata["table"] = {"legs": [4]}

    @in_ranks
    def test_fails():
        print("said before it fails")
        assert [1, 2] == [1, 3]

    @in_ranks
    def test_breaks_in_setup(broken): pass

    @in_ranks
    def test_skips(): pytest.skip("not today")

    @in_ranks
    @pytest.mark.xfail(reason="known")
    def test_fails_as_expected(): assert 0

    def test_is_not_marked(record_property): record_property("color", "blue")

    @in_ranks
    @seed(1)
    @settings(deadline=None, database=None, max_examples=20)
    @given(x=st.integers(0, 9))
    def test_of_examples(x):
        assume(x)
        target(float(x), label="size")

    @in_ranks
    @scenario("sums.feature", "Right")
    def test_right(): pass

    @in_ranks
    @scenario("sums.feature", "Wrong in one rank")
    def test_wrong(): pass

    @given_step(parsers.parse("a number of {number:d}"), target_fixture="number")
    def number(number): return number

    @then(parsers.parse("it is {expected:d}"))
    def check(number, expected): assert number == expected + (LAST and expected == 1)
    """
_FEATURE = """
    Feature: Sums
      Scenario: Right
        Given a number of 2
        Then it is 2

      Scenario: Wrong in one rank
        Given a number of 1
        Then it is 1
        And it is 1
    """
_PLUGINS = {
    "pytest_html.fixtures": "pytest_html",
    "pytest_html.plugin": "pytest_html",
    "metadata": "pytest_metadata",
    "pytest_jsonreport": "pytest_jsonreport",
    "pytest_reportlog": "pytest_reportlog",
    "pytest_bdd.plugin": "pytest_bdd",
    "_hypothesis_pytestplugin": "hypothesis",
}
_OPTIONS = (
    *(
        "--junitxml=junit.xml",
        "--html=page.html",
        "--self-contained-html",
        "--report-log=log.jsonl",
    ),
    *("--json-report", "--json-report-file=report.json", "--cucumberjson=cucumber.json"),
    *("--hypothesis-show-statistics", "-W", "ignore"),  # Some plugins use what pytest deprecates.
)


def _plain(text: str | None) -> str:
    """Return `text` without labels that name ranks."""
    return re.sub(r"( \[ranks? [\d, -]+\])|(\branks? [\d, -]+: )", "", text or "")


def _read_junit(folder: Path) -> Any:
    suite = next(xml.etree.ElementTree.parse(folder / "junit.xml").iter("testsuite"))

    def properties(element: xml.etree.ElementTree.Element) -> list[dict[str, str]]:
        found = [dict(one.attrib) for one in element.iterfind("./properties/property")]
        return [one for one in found if not one["name"].startswith(("accel_", "hypothesis-"))]

    def case(one: xml.etree.ElementTree.Element) -> Any:
        ends = [(end.tag, _plain(end.get("message")).partition("\n")[0]) for end in one if end.tag != "properties"]
        return (
            {name: one.get(name) for name in ("name", "classname", "assertions", "node", "line")},
            properties(one),
            ends,
        )

    numbers = {name: suite.get(name) for name in ("tests", "errors", "failures", "skipped")}
    return numbers, properties(suite), sorted(map(case, suite.iter("testcase")), key=repr)


def _read_html(folder: Path) -> Any:
    found = re.search(r'data-jsonblob="([^"]*)"', (folder / "page.html").read_text())
    assert found is not None
    data = json.loads(html.unescape(found[1]))
    return {
        name: [(one["result"], [extra["name"] for extra in one["extras"]], "said" in one["log"]) for one in reports]
        for name, reports in data["tests"].items()
    }


def _read_json(folder: Path) -> Any:
    data = json.loads((folder / "report.json").read_text())

    def stage(one: dict[str, Any]) -> Any:
        return one["outcome"], one.get("stdout"), [record["msg"] for record in one.get("log", ())]

    return data["summary"], {
        one["nodeid"]: (
            one["outcome"],
            one.get("metadata"),
            [stage(one[when]) for when in ("setup", "call") if when in one],
        )
        for one in data["tests"]
    }


def _read_report_log(folder: Path) -> Any:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return sorted((line["$report_type"], line.get("nodeid"), line.get("when"), line.get("outcome")) for line in lines)


def _read_cucumber(folder: Path) -> Any:
    features = json.loads((folder / "cucumber.json").read_text())
    return {
        element["name"]: [(step["keyword"], step["name"], step["result"]["status"]) for step in element["steps"]]
        for feature in features
        for element in feature["elements"]
    }


_READERS = (_read_junit, _read_html, _read_json, _read_report_log, _read_cucumber)


@needs(*_PLUGINS.values())
def test_reports_of_marked_and_unmarked_tests_are_equal(pair: Pair) -> None:
    pair.plugin(*_PLUGINS)
    pair.ini("junit_family = xunit1\njunit_logging = all")
    pair.write("sums.feature", _FEATURE)
    pair.write("test_it.py", _SUITE)
    plain, run = pair.plain.run(*_OPTIONS), pair.marked.run(*_OPTIONS)
    assert plain.count() == {"PASSED": 5, "FAILED": 2, "ERROR": 1, "SKIPPED": 1, "XFAIL": 1}
    assert (run.ret, run.outcomes()) == (plain.ret, plain.outcomes())
    for read in _READERS:
        assert read(pair.marked.path) == read(pair.plain.path)
    statistics = run.text.partition(" Hypothesis Statistics ")[2].partition("\n===")[0]
    for text in ("test_it.py::test_of_examples:", "gave up because: failed to satisfy assume()", "target score: 9"):
        assert text in statistics


@needs(*_PLUGINS.values())
def test_data_is_that_of_rank_0_or_of_the_rank_that_has_failed(pair: Pair) -> None:
    pair.plugin(*_PLUGINS)
    pair.ini("junit_family = xunit1")
    pair.marked.write(
        "test_it.py",
        """
        import pytest
        from pytest_html import extras as made

        @pytest.mark.distributed(2, kind="cpu")
        @pytest.mark.parametrize("fails", [False, True])
        def test_differs(rank, fails, extras, json_metadata, record_xml_attribute, record_testsuite_property):
            record_xml_attribute("node", rank)
            record_testsuite_property("board", rank)
            extras.append(made.url(f"https://example.org/{rank}", name=f"words {rank}"))
            json_metadata["table"] = rank
            assert not (fails and rank)
        """,
    )
    pair.marked.run(*_OPTIONS)
    folder = pair.marked.path
    names = [f"test_it.py::test_differs[{fails}]" for fails in (False, True)]
    _, properties, cases = _read_junit(folder)
    assert [one["value"] for one in properties] == ["0", "0"]
    assert [attributes["node"] for attributes, *_ in cases] == ["0", "0"]
    shown = _read_html(folder)
    assert [extras for name in names for _, extras, _ in shown[name]] == [["words 0"], ["words 1"]]
    assert [_read_json(folder)[1][name][1] for name in names] == [{"table": 0}, {"table": 1}]


_STREAMED = """
    import pytest

    in_ranks = pytest.mark.distributed(2, kind="cpu")

    @in_ranks
    @pytest.mark.parametrize("number", [1, "two"])
    def test_passes(number): print("said in the test")

    @in_ranks
    def test_fails(): assert [1, 2] == [1, 3]

    @in_ranks
    def test_skips(): pytest.skip("not today")

    def test_is_not_marked(): assert "ab" == "ac"
    """


def _first_difference(message: str | None) -> list[str]:
    """Return the first line of the error in `message`; an empty list if there is none."""
    lines = (message or "").splitlines()
    # teamcity-messages raises an error of its own where an assertion compares, but not in ranks.
    return [line.replace("AssertionError: ", "") for line in lines if line.startswith("E ")][:1]


def _parse_teamcity(run: Run) -> Any:
    """Return the messages that `run` shows: name, test, and the first line of an error."""
    messages = []
    for name, text in re.findall(r"##teamcity\[(\w+) (.*)\]$", run.text, re.MULTILINE):
        values = {key: value.replace("|n", "\n") for key, value in re.findall(r"(\w+)='((?:\|.|[^|'])*)'", text)}
        if name != "testCount":
            details = _first_difference(values.get("details"))
            messages.append((name, values["name"], values.get("message", "").partition("\n")[0], details))
    return sorted(messages)


def _parse_annotations(run: Run) -> Any:
    return sorted(_plain(line.partition("%0A%0A")[0]) for line in run.errors.splitlines() if line.startswith("::"))


@needs("teamcity", "pytest_github_actions_annotate_failures")
def test_streamed_reports_of_marked_and_unmarked_tests_are_equal(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.plugin("pytest-teamcity", "pytest_github_actions_annotate_failures")
    pair.write("test_it.py", _STREAMED)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    plain, run = (suite.run("--teamcity", "-W", "default", "-n1") for suite in (pair.plain, pair.marked))
    assert (run.ret, run.count()) == (plain.ret, plain.count())
    for read in (_parse_teamcity, _parse_annotations):
        assert read(run) == read(plain) != []
