"""Tests of reporters: reports of marked and unmarked tests are equal, except for data that differs between ranks."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.features.plugins.conftest import needs
from tests.run import Run

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair

_SUITE = """
    import logging

    import pytest
    from pytest_html import extras as made

    in_ranks = pytest.mark.distributed(2, kind="cpu")

    @pytest.fixture(scope="session")
    def named(metadata):
        metadata["cluster"] = "seven"

    @pytest.fixture
    def broken():
        raise OSError("no such disk")

    @in_ranks
    @pytest.mark.parametrize("number", [1, "two"])
    def test_records(
        number, named, extras, json_metadata, record_property, record_xml_attribute, record_testsuite_property
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
    def test_breaks_in_setup(broken):
        pass

    @in_ranks
    def test_skips():
        pytest.skip("not today")

    @in_ranks
    @pytest.mark.xfail(reason="known")
    def test_fails_as_expected():
        assert 0

    def test_is_not_marked(record_property):
        record_property("color", "blue")
    """

_PLUGINS = {
    "ctrf": "ctrf",
    "pytest_html.fixtures": "pytest_html",
    "pytest_html.plugin": "pytest_html",
    "metadata": "pytest_metadata",
    "pytest_jsonreport": "pytest_jsonreport",
    "pytest_reportlog": "pytest_reportlog",
}
_OPTIONS = (
    "--junitxml=junit.xml",
    *("--html=page.html", "--self-contained-html"),
    *("--json-report", "--json-report-file=report.json"),
    "--report-log=log.jsonl",
    "--ctrf=ctrf.json",
    *("-W", "ignore"),  # Some plugins use what pytest deprecates.
)


def _strip_rank_labels(text: str | None) -> str:
    """Return `text` without labels that name ranks."""
    return re.sub(r"( \[ranks? [\d, -]+\])|(\branks? [\d, -]+: )", "", text or "")


def _read_properties(element: xml.etree.ElementTree.Element) -> list[tuple[str, str]]:
    """Return names and values of the properties of `element`, without those of this plugin."""
    found = [(one.get("name", ""), one.get("value", "")) for one in element.iterfind("./properties/property")]
    return [one for one in found if not one[0].startswith("accel_")]


def _read_junit(folder: Path) -> Any:
    suite = next(xml.etree.ElementTree.parse(folder / "junit.xml").iter("testsuite"))
    cases = [
        (
            {name: value for name, value in case.attrib.items() if name != "time"},
            _read_properties(case),
            [
                (one.tag, _strip_rank_labels(one.get("message")), "said" in (one.text or ""))
                for one in case
                if one.tag != "properties"
            ],
        )
        for case in suite.iter("testcase")
    ]
    numbers = {name: suite.get(name) for name in ("tests", "errors", "failures", "skipped")}
    return numbers, _read_properties(suite), sorted(cases, key=repr)


def _read_html(folder: Path) -> Any:
    page = (folder / "page.html").read_text()
    found = re.search(r'data-jsonblob="([^"]*)"', page)
    assert found is not None
    data = json.loads(html.unescape(found[1]))
    tests = {
        name: [(one["result"], [extra["name"] for extra in one["extras"]], "said" in one["log"]) for one in reports]
        for name, reports in data["tests"].items()
    }
    return tests, data["environment"]["cluster"]


def _read_json(folder: Path) -> Any:
    data = json.loads((folder / "report.json").read_text())

    def stage(one: dict[str, Any]) -> Any:
        logged = [record["msg"] for record in one.get("log", ())]
        crash = _strip_rank_labels(one["crash"]["message"]) if "crash" in one else None
        return one["outcome"], one.get("stdout"), logged, crash, len(one.get("traceback", ()))

    tests = {
        test["nodeid"]: (
            test["outcome"],
            test.get("metadata"),
            [one for one in test.get("user_properties", ()) if not any(name.startswith("accel_") for name in one)],
            {when: stage(test[when]) for when in ("setup", "call", "teardown") if when in test},
        )
        for test in data["tests"]
    }
    return data["summary"], data["exitcode"], tests


def _read_report_log(folder: Path) -> Any:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return sorted((line["$report_type"], line.get("nodeid"), line.get("when"), line.get("outcome")) for line in lines)


def _read_ctrf(folder: Path) -> Any:
    results = json.loads((folder / "ctrf.json").read_text())["results"]
    names = ("name", "status", "rawStatus", "parameters", "suite", "filePath")
    tests = [
        (
            {name: one.get(name) for name in names},
            sorted(tag for tag in one.get("tags", ()) if not tag.startswith("xfail")),
            _strip_rank_labels(one.get("message")),
        )
        for one in results["tests"]
    ]
    return {name: results["summary"][name] for name in ("tests", "passed", "failed", "skipped")}, sorted(
        tests, key=repr
    )


_READERS: tuple[Callable[[Path], Any], ...] = (
    _read_junit,
    _read_html,
    _read_json,
    _read_report_log,
    _read_ctrf,
)


@needs(*_PLUGINS.values())
@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["no-xdist", "xdist"])
def test_reports_of_marked_and_unmarked_tests_are_equal(pair: Pair, workers: tuple[str, ...]) -> None:
    pair.plugin(*_PLUGINS)
    pair.ini("junit_family = xunit1\njunit_logging = all")
    pair.write("test_it.py", _SUITE)
    plain, run = pair.plain.run(*_OPTIONS, *workers), pair.marked.run(*_OPTIONS, *workers)
    assert plain.count() == {"PASSED": 3, "FAILED": 1, "ERROR": 1, "SKIPPED": 1, "XFAIL": 1}
    assert (run.ret, run.outcomes()) == (plain.ret, plain.outcomes())
    for read in _READERS:
        assert read(pair.marked.path) == read(pair.plain.path)


_STREAMED = """
    import unittest

    import pytest

    in_ranks = pytest.mark.distributed(2, kind="cpu")

    @in_ranks
    @pytest.mark.parametrize("number", [1, "two"])
    def test_passes(number):
        print("said in the test")

    @in_ranks
    def test_fails():
        assert [1, 2] == [1, 3]

    @in_ranks
    def test_raises():
        raise ValueError("no number")

    @in_ranks
    def test_skips():
        pytest.skip("not today")

    @in_ranks
    @pytest.mark.skip(reason="never")
    def test_is_skipped():
        pass

    @in_ranks
    def test_warns():
        import warnings

        warnings.warn("mind the gap")

    def test_is_not_marked():
        assert "ab" == "ac"
    """

# A reporter with the hooks of VS Code's plugin, which the editor loads by ``-p vscode_pytest`` from its own folder. In
# each process, it sends each test once, at the first hook that shows the outcome.
VSCODE_PLUGIN = """
    import json
    import os

    import pytest

    _sent = set()
    _pipe = None

    def _send(nodeid, outcome, message=None):
        global _pipe
        if nodeid not in _sent:
            _sent.add(nodeid)
            if _pipe is None:
                _pipe = open(os.environ["TEST_RUN_PIPE"], "a")
            _pipe.write(json.dumps([nodeid, outcome, message]) + "\\n")
            _pipe.flush()

    def pytest_exception_interact(node, call, report):
        _send(node.nodeid, "failure" if call.excinfo.typename == "AssertionError" else "error", report.longreprtext)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_report_teststatus(report):
        if report.when == "call" or (report.when == "setup" and report.skipped):
            outcome = "success" if report.passed else "failure" if report.failed else "skipped"
            _send(report.nodeid, outcome, report.longreprtext if report.failed else None)
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_protocol(item):
        if any(mark.name == "skip" for mark in item.own_markers):
            _send(item.nodeid, "skipped")
        return (yield)

    def pytest_sessionfinish(exitstatus):
        _send("", str(int(exitstatus)))
    """


def _read_vscode(suite: Suite, run: Run) -> Any:
    """Return the messages, without the exit statuses of workers: these depend on the tests that each worker runs."""
    sent = [json.loads(line) for line in suite.read("pipe")]
    found = [(nodeid, outcome, _first_difference(message)) for nodeid, outcome, message in sent]
    assert ("", str(int(run.ret)), []) in found
    return sorted(message for message in found if message[0])


def _first_difference(message: str | None) -> list[str]:
    """Return the first line of the error in `message`; an empty list if there is none."""
    lines = (message or "").splitlines()
    # teamcity-messages raises an error of its own where an assertion compares, but not in ranks.
    return [line.replace("AssertionError: ", "") for line in lines if line.startswith("E ")][:1]


_LEFT_OUT = {"timestamp", "duration", "actual", "expected", "type"}


def _parse_teamcity(suite: Suite, run: Run) -> Any:
    """Return the messages that `run` shows, without times and values, and only with the first line of an error."""
    found = re.findall(r"##teamcity\[(\w+) (.*)\]$", run.text, re.MULTILINE)
    messages = []
    for name, text in found:
        values = {key: value.replace("|n", "\n") for key, value in re.findall(r"(\w+)='((?:\|.|[^|'])*)'", text)}
        if "details" in values:
            values["details"] = str(_first_difference(values["details"]))
        if "message" in values:
            values["message"] = values["message"].partition("\n")[0]
        if name != "testCount":
            messages.append((name, {key: values[key] for key in sorted(values.keys() - _LEFT_OUT)}))
    return sorted(messages, key=repr)


def _parse_annotations(suite: Suite, run: Run) -> Any:
    return sorted(
        _strip_rank_labels(line.partition("%0A%0A")[0]) for line in run.errors.splitlines() if line.startswith("::")
    )


@needs("teamcity", "pytest_github_actions_annotate_failures")
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["no-xdist", "xdist"])
def test_streamed_reports_of_marked_and_unmarked_tests_are_equal(
    pair: Pair, workers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.plugin("pytest-teamcity", "pytest_github_actions_annotate_failures", "vscode_pytest")
    pair.write("test_it.py", _STREAMED)
    pair.write("vscode_pytest.py", VSCODE_PLUGIN)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("TEST_RUN_PIPE", "pipe")
    plain, run = (suite.run("--teamcity", "-W", "default", *workers) for suite in (pair.plain, pair.marked))
    assert plain.ret == 1
    assert (run.ret, run.count()) == (plain.ret, plain.count())
    for read in (_read_vscode, _parse_teamcity, _parse_annotations):
        expected = read(pair.plain, plain)
        assert expected
        assert read(pair.marked, run) == expected


@needs(*_PLUGINS.values())
def test_data_is_that_of_rank_0_or_of_the_rank_that_has_failed(pair: Pair) -> None:
    pair.plugin(*_PLUGINS)
    pair.ini("junit_family = xunit1")
    pair.write(
        "test_it.py",
        """
        import shutil

        import pytest
        from pytest_html import extras as made


        def test_removes_what_is_made_once():
            shutil.rmtree("assets")


        @pytest.mark.distributed(2, kind="cpu")
        @pytest.mark.parametrize("fails", [False, True])
        def test_differs(rank, fails, metadata, extras, json_metadata, record_xml_attribute, record_testsuite_property):
            record_xml_attribute("node", rank)
            record_testsuite_property("board", rank)
            extras.append(made.url(f"https://example.org/{rank}", name=f"words {rank}"))
            metadata["cluster"] = json_metadata["table"] = rank
            assert not (fails and rank)
        """,
    )
    run = pair.marked.run(*(option for option in _OPTIONS if option != "--self-contained-html"))
    assert run.count() == {"PASSED": 2, "FAILED": 1}
    folder = pair.marked.path
    assert not (folder / "assets").exists()  # Ranks start later and do not create the report's folder again.
    _, properties, cases = _read_junit(folder)
    assert properties == [("board", "0")] * 2
    assert [attributes.get("node") for attributes, *_ in cases] == ["0", "0", None]
    page = json.loads(
        html.unescape((folder / "page.html").read_text().partition('data-jsonblob="')[2].partition('"')[0])
    )
    shown = {name: [extra["name"] for one in tests for extra in one["extras"]] for name, tests in page["tests"].items()}
    assert shown["test_it.py::test_differs[False]"] == ["words 0"]
    assert shown["test_it.py::test_differs[True]"] == ["words 1"]
    assert page["environment"]["cluster"] == 0
    tests = {one["nodeid"]: one for one in json.loads((folder / "report.json").read_text())["tests"]}
    assert [tests[f"test_it.py::test_differs[{fails}]"]["metadata"]["table"] for fails in (False, True)] == [0, 1]
