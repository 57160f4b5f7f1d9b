"""Tests of reporters: reports of marked and unmarked tests are equal, except for data that differs between ranks."""

from __future__ import annotations

import csv
import html
import json
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.other_plugins.conftest import needs
from tests.run import Run

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.other_plugins.conftest import Pair

_SUITE = """
    import logging
    import os

    import pytest
    from buildkite_test_collector.collector.payload import TestSpan
    from datetime import timedelta
    from pytest_html import extras as made

    in_ranks = pytest.mark.distributed(2, device="cpu")

    @pytest.fixture(scope="session")
    def named(metadata):
        metadata["cluster"] = "seven"

    @pytest.fixture
    def broken():
        raise OSError("no such disk")

    @in_ranks
    @pytest.mark.execution_tag("team", "a")
    @pytest.mark.parametrize("number", [1, "two"])
    def test_records(
        number, named, spans, extras, json_metadata, record_property, record_xml_attribute, record_testsuite_property,
        record_nunit_property, add_nunit_attachment,
    ):
        "Adds what it is given."
        print("said in the test")
        logging.getLogger("suite").warning("logged in the test")
        record_property("color", "red")
        record_xml_attribute("assertions", 7)
        record_testsuite_property("board", "b1")
        record_nunit_property("lamp", "on")
        add_nunit_attachment("lamp.txt", "the lamp")
        extras.append(made.text("words of the test", name="words"))
        json_metadata["table"] = {"legs": [4]}
        spans.record(TestSpan(section="annotation", duration=timedelta(seconds=1), detail={"content": "spanned"}))

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
    "buildkite-test-collector": "buildkite_test_collector",
    "ctrf": "ctrf",
    "pytest_html.fixtures": "pytest_html",
    "pytest_html.plugin": "pytest_html",
    "metadata": "pytest_metadata",
    "nunit": "pytest_nunit",
    "pytest-md-report": "pytest_md_report",
    "pytest_csv": "pytest_csv",
    "pytest_jsonreport": "pytest_jsonreport",
    "pytest_reportlog": "pytest_reportlog",
}
_OPTIONS = (
    "--junitxml=junit.xml",
    *("--html=page.html", "--self-contained-html"),
    *("--json-report", "--json-report-file=report.json"),
    "--report-log=log.jsonl",
    *("--csv=table.csv", "--csv-columns=id,status,message,markers,properties_as_columns"),
    *("--md-report", "--md-report-output=table.md", "--md-report-verbose=2", "--md-report-color=never"),
    "--nunitxml=nunit.xml",
    "--ctrf=ctrf.json",
    "--json=buildkite.json",
    *("-W", "ignore"),  # Some plugins use what pytest deprecates.
)


def _strip_rank_labels(text: str | None) -> str:
    """Return `text` without labels that name ranks."""
    return re.sub(r"( \[ranks? [\d, -]+\])|(\branks? [\d, -]+: )", "", text or "")


def _first_line(text: str | None) -> str:
    """Return the first line of `text` below the headline of ranks."""
    return re.sub(r"^ranks [\d-]+ of .*\n", "", _strip_rank_labels(text).strip()).strip().partition("\n")[0]


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


def _read_csv(folder: Path) -> Any:
    with open(folder / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    kept_rows = [[(name, _first_line(row[name])) for name in row if not name.startswith("accel_")] for row in rows]
    return sorted(kept_rows)


def _read_markdown(folder: Path) -> Any:
    return sorted((folder / "table.md").read_text().splitlines())


def _read_nunit(folder: Path) -> Any:
    def case(element: xml.etree.ElementTree.Element) -> Any:
        parts = [element.find(name) for name in ("failure/message", "reason/message", "output")]
        attachments = [
            (one.findtext("filePath"), one.findtext("description"))
            for one in element.iterfind("attachments/attachment")
        ]
        texts = [_first_line(part.text) if part is not None else None for part in parts]
        return element.get("fullname"), element.get("result"), _read_properties(element), attachments, texts

    root = xml.etree.ElementTree.fromstring(re.sub(rf"{folder}|gw\d", "", (folder / "nunit.xml").read_text()))
    return sorted((case(one) for one in root.iter("test-case")), key=repr)


def _read_ctrf(folder: Path) -> Any:
    results = json.loads((folder / "ctrf.json").read_text())["results"]
    names = ("name", "status", "rawStatus", "parameters", "suite", "filePath")
    tests = [
        ({name: one.get(name) for name in names}, sorted(one.get("tags", ())), _strip_rank_labels(one.get("message")))
        for one in results["tests"]
    ]
    return {name: results["summary"][name] for name in ("tests", "passed", "failed", "skipped")}, sorted(
        tests, key=repr
    )


def _read_buildkite(folder: Path) -> Any:
    tests = json.loads((folder / "buildkite.json").read_text())
    return sorted(
        (
            one["scope"],
            one["name"],
            one["result"],
            _strip_rank_labels(one.get("failure_reason")),
            [(span["section"], span["duration"], span["detail"]) for span in one["history"]["children"]],
            sorted(one.get("tags", {}).items()),
        )
        for one in tests
    )


_READERS: tuple[Callable[[Path], Any], ...] = (
    _read_junit,
    _read_html,
    _read_json,
    _read_report_log,
    _read_csv,
    _read_markdown,
    _read_nunit,
    _read_ctrf,
    _read_buildkite,
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


@needs("buildkite_test_collector")
def test_buildkite_spans_are_equal_if_a_conftest_skips_or_runs_tests(pair: Pair) -> None:
    """The hooks of a conftest in a folder run before those of plugins."""
    pair.plugin("buildkite-test-collector")
    pair.write(
        "skips/conftest.py",
        """
        import os

        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(item):
            if "RANK" in os.environ or not item.config.pluginmanager.has_plugin("accel"):
                pytest.skip("not in this folder")
        """,
    )
    pair.write(
        "runs/conftest.py",
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            if item.name == "test_runs":
                runtestprotocol(item, nextitem=nextitem)  # No plugin hears that the test starts.
                return True
        """,
    )
    for folder in ("a", "runs", "skips", "z"):
        pair.write(
            f"{folder}/test_{folder}.py",
            f"""
            from datetime import timedelta

            import pytest
            from buildkite_test_collector.collector.payload import TestSpan

            @pytest.mark.distributed(2)
            def test_{folder}(request, pytestconfig):
                if hasattr(pytestconfig, "_buildkite") and request.node.nodeid in pytestconfig._buildkite.in_flight:
                    spans = request.getfixturevalue("spans")
                    spans.record(TestSpan(section="annotation", duration=timedelta(0, 1), detail={{"content": "a"}}))
            """,
        )
    for folder, names in ((".", ["test_a", "test_skips", "test_z"]), ("runs", [])):
        pair.run_both("--json=buildkite.json", "-W", "ignore", folder)
        tests = [_read_buildkite(one.path) for one in (pair.plain, pair.marked)]
        assert tests[1] == tests[0]
        assert [name for _, name, *_ in tests[1]] == names


_STREAMED = """
    import unittest

    import pytest

    in_ranks = pytest.mark.distributed(2, device="cpu")

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
    return [line for line in (message or "").splitlines() if line.startswith("E ")][:1]


def _parse_teamcity(suite: Suite, run: Run) -> Any:
    """Return the messages that `run` shows, without times, and only with the first line of an error."""
    found = re.findall(r"##teamcity\[(\w+) (.*)\]$", run.text, re.MULTILINE)
    messages = []
    for name, text in found:
        values = {key: value.replace("|n", "\n") for key, value in re.findall(r"(\w+)='((?:\|.|[^|'])*)'", text)}
        if "details" in values:
            values["details"] = str(_first_difference(values["details"]))
        if name != "testCount":
            messages.append((name, {key: values[key] for key in sorted(values.keys() - {"timestamp", "duration"})}))
    return sorted(messages, key=repr)


def _parse_annotations(suite: Suite, run: Run) -> Any:
    return sorted(
        _strip_rank_labels(line.partition("%0A%0A")[0]) for line in run.errors.splitlines() if line.startswith("::")
    )


def _parse_azure(suite: Suite, run: Run) -> Any:
    return sorted(
        line.replace(str(suite.path), "")
        for line in run.text.splitlines()
        if line.startswith(("##vso", "Skipping upl"))
    )


@needs("teamcity", "pytest_github_actions_annotate_failures", "pytest_azurepipelines", "pytest_nunit")
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["no-xdist", "xdist"])
def test_streamed_reports_of_marked_and_unmarked_tests_are_equal(
    pair: Pair, workers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.plugin(
        "pytest-teamcity", "pytest_github_actions_annotate_failures", "nunit", "azurepipelines", "vscode_pytest"
    )
    pair.write("test_it.py", _STREAMED)
    pair.write("vscode_pytest.py", VSCODE_PLUGIN)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("TEST_RUN_PIPE", "pipe")
    plain, run = (suite.run("--teamcity", "-W", "default", *workers) for suite in (pair.plain, pair.marked))
    assert plain.ret == 1
    assert (run.ret, run.count()) == (plain.ret, plain.count())
    for read in (_read_vscode, _parse_teamcity, _parse_annotations, _parse_azure):
        expected = read(pair.plain, plain)
        assert expected
        assert read(pair.marked, run) == expected


@needs("teamcity")
def test_plugin_passed_by_a_runner_reports_marked_tests(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyCharm's runner passes its own copy of the plugin if teamcity-messages is not installed."""
    pair.write("test_it.py", _STREAMED)
    pair.write(
        "runner.py",
        """
        import sys

        import pytest
        from teamcity import pytest_plugin

        sys.exit(pytest.main(sys.argv[1:], [pytest_plugin]))
        """,
    )
    pair.plain.write("pytest.ini", "[pytest]\nmarkers = distributed")
    pair.marked.write("pytest.ini", "[pytest]\naccel = sim:4")
    monkeypatch.setenv("TEAMCITY_VERSION", "LOCAL")
    results = []
    for suite, options in ((pair.plain, ()), (pair.marked, ("-p", "accel"))):
        command = [sys.executable, "runner.py", *options, "--jb-swapdiff", "-W", "default", "-k", "fails or passes"]
        done = subprocess.run(command, cwd=suite.path, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr)
        results.append((done.returncode, _parse_teamcity(suite, Run(done.returncode, done.stdout, done.stderr))))
    assert results[0][0] == 1
    assert results[1] == results[0]


@needs(*_PLUGINS.values())
def test_data_that_differs_between_ranks_is_labelled_by_rank(pair: Pair) -> None:
    pair.plugin(*_PLUGINS)
    pair.ini("junit_family = xunit1")
    pair.write(
        "test_it.py",
        """
        import logging
        import shutil

        import pytest
        from pytest_html import extras as made


        def test_removes_what_is_made_once():
            shutil.rmtree("assets")


        @pytest.mark.distributed(2, device="cpu")
        def test_differs(
            rank, metadata, extras, json_metadata, record_xml_attribute, record_testsuite_property,
            record_nunit_property, add_nunit_attachment,
        ):
            print("said by", rank)
            logging.getLogger("suite").warning("logged by %s", rank)
            record_xml_attribute("node", rank)
            record_testsuite_property("board", rank)
            record_nunit_property("lamp", str(rank))
            add_nunit_attachment(f"lamp{rank}.txt", "the lamp")
            extras.append(made.url(f"https://example.org/{rank}", name="words"))
            metadata["cluster"] = json_metadata["table"] = rank
            metadata["all"] = "same"
            if rank == 1:
                record_xml_attribute("only", "one")
        """,
    )
    pair.marked.write(
        "conftest.py",
        """
        import os
        from pathlib import Path

        import pytest


        @pytest.hookimpl(trylast=True)
        def pytest_unconfigure():
            if "RANK" in os.environ:  # Ranks end before the driver writes it.
                Path("end." + os.environ["RANK"]).write_text(str(os.path.exists("table.md")))
        """,
    )
    run = pair.marked.run(*(option for option in _OPTIONS if option != "--self-contained-html"))
    assert (run.ret, run.count()) == (0, {"PASSED": 2})
    folder = pair.marked.path
    assert [pair.marked.read(f"end.{rank}") for rank in (0, 1)] == [["False"], ["False"]]
    assert not (folder / "assets").exists()  # Ranks start later and do not create the report's folder again.
    _, properties, ((attributes, *_), _) = _read_junit(folder)
    assert properties == [("board [rank 0]", "0"), ("board [rank 1]", "1")]
    assert {name: attributes.get(name) for name in ("node.rank0", "node.rank1", "only")} == {
        "node.rank0": "0",
        "node.rank1": "1",
        "only": "one",
    }
    page = json.loads(
        html.unescape((folder / "page.html").read_text().partition('data-jsonblob="')[2].partition('"')[0])
    )
    assert [one["name"] for one in page["tests"]["test_it.py::test_differs"][0]["extras"]] == [
        "words [rank 0]",
        "words [rank 1]",
    ]
    environment = page["environment"]
    assert (environment["cluster [rank 0]"], environment["cluster [rank 1]"], environment["all"]) == (0, 1, "same")
    _, test = json.loads((folder / "report.json").read_text())["tests"]
    assert test["metadata"] == {"table [rank 0]": 0, "table [rank 1]": 1}
    assert test["call"]["stdout"] == "[rank 0]\nsaid by 0\n\n[rank 1]\nsaid by 1\n"
    assert [one["msg"] for one in test["call"]["log"]] == ["logged by 0 [rank 0]", "logged by 1 [rank 1]"]
    (_, _, nunit_properties, attachments, _), _ = _read_nunit(folder)
    assert [one for one in nunit_properties if "lamp" in one[0]] == [("lamp [rank 0]", "0"), ("lamp [rank 1]", "1")]
    assert [description for _, description in attachments] == ["the lamp [rank 0]", "the lamp [rank 1]"]


class _PortalHandler(BaseHTTPRequestHandler):
    """A handler that answers requests like ReportPortal when a session begins and ends."""

    def do_POST(self) -> None:
        body = b'{"id": "1", "number": 1}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@needs("pytest_jsonreport")
def test_json_metadata_of_ranks_keeps_numbers(pair: Pair) -> None:
    pair.plugin("pytest_metadata.plugin", "pytest_jsonreport.plugin")
    pair.write(
        "test_it.py",
        """
        import enum
        from collections import namedtuple

        import numpy as np
        import pytest

        Size = namedtuple("Size", "width height")


        class Level(enum.IntEnum):
            HIGH = 3


        @pytest.mark.distributed(2, device="cpu")
        def test_numbers(json_metadata):
            json_metadata.update(loss=np.float64(0.5), size=Size(4, np.float64(5)), level=Level.HIGH)
        """,
    )
    pair.run_both("--json-report", "-Wdefault")
    plain, marked = (
        json.loads((one.path / ".report.json").read_text())["tests"][0]["metadata"] for one in (pair.plain, pair.marked)
    )
    assert marked == plain == {"loss": 0.5, "size": [4, 5.0], "level": 3}


@needs("pytest_bdd", "pytest_reportportal")
def test_reportportal_is_refused_for_marked_tests(suite: Suite) -> None:
    suite.plugin("pytest_bdd.plugin")  # pytest-reportportal implements hooks of pytest-bdd if it is installed.
    suite.plugin("pytest_reportportal")
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2, device="cpu")
        def test_in_ranks():
            pass


        def test_not_marked():
            pass
        """,
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), _PortalHandler)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = (
            "--reportportal",
            *("-W", "ignore"),
            *("-o", f"rp_endpoint=http://127.0.0.1:{server.server_port}", "-o", "rp_project=p", "-o", "rp_api_key=k"),
        )
        refused, plain = suite.run(*options), suite.run(*options, "-k", "not_marked")
        server.shutdown()
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --reportportal: pytest-reportportal cannot report tests that run in ranks" in refused.errors
    assert plain.ret == 0
