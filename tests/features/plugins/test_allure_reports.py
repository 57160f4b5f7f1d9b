"""Tests of allure-pytest: results, fixtures, steps and attachments of marked tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.features.plugins.conftest import Pair, needs

pytestmark = needs("allure_pytest")

_SUITE = """
    import os

    import allure
    import pytest

    RANK = os.environ.get("RANK", "0")
    in_ranks = pytest.mark.distributed(2, kind="cpu")

    @pytest.fixture(scope="module")
    def shared():
        with allure.step("prepare"):
            pass
        yield "here"
        allure.attach("bye", "at the end")

    @pytest.fixture
    def own(shared): yield 2

    @pytest.fixture
    def broken(): raise OSError("no such disk")

    @allure.feature("sums")
    @allure.severity(allure.severity_level.CRITICAL)
    @allure.title("Number {number} with {own}")
    @pytest.mark.parametrize("number", [1, "two"])
    @in_ranks
    def test_passes(own, number, tmp_path):
        "Adds what it is given."
        print("said in the test")
        with allure.step("outer"):
            allure.attach("words", "text", allure.attachment_type.TEXT)
            with allure.step("inner"):
                pass
        (tmp_path / "page.html").write_text("<p>")
        allure.attach.file(tmp_path / "page.html", "page", allure.attachment_type.HTML)
        allure.dynamic.parameter("seed", 3)
        allure.dynamic.story("adding")
        allure.dynamic.link("https://example.org/7", name="seven")
        allure.dynamic.description("Adds, and says so.")

    @in_ranks
    def test_fails(shared):
        allure.dynamic.title("Fails on purpose")
        with allure.step("compare"):
            assert 1 == 2

    @in_ranks
    def test_breaks_in_setup(broken): pass

    @in_ranks
    def test_differs_by_rank():
        with allure.step("all"):
            pass
        with allure.step("of " + RANK):
            allure.attach("words of " + RANK, "note")
        if RANK == "1":
            allure.attach("from 1", "only one")
        allure.dynamic.parameter("rank", int(RANK))

    def test_is_not_marked(own): pass
    """


_VOLATILE_KEYS = ("uuid", "start", "stop", "timestamp")
"""Keys whose values differ between sessions."""


def _read_results(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return results by test, and fixtures; without times, ids and absolute paths."""

    def load(path: Path) -> Any:
        return json.loads(path.read_text().replace(str(folder.parent), ""))

    def clean(data: Any) -> Any:
        if isinstance(data, list):
            return [clean(part) for part in data]
        if not isinstance(data, dict):
            return data
        kept = {name: clean(value) for name, value in data.items() if name not in _VOLATILE_KEYS}
        if "source" in kept:
            kept["source"] = (folder / kept["source"]).read_text()
        if "labels" in kept:
            kept["labels"] = sorted(
                (label["name"], label["value"]) for label in kept["labels"] if label["name"] not in ("host", "thread")
            )
        return kept

    results: dict[str, Any] = {}
    tests: dict[str, str] = {}
    for path in folder.glob("*-result.json"):
        data = load(path)
        numbers = [parameter["value"] for parameter in data.get("parameters", ()) if parameter["name"] == "number"]
        name = data["fullName"].partition("#")[2] + "".join(numbers)
        assert name not in results, f"two results for {name}"
        tests[data["uuid"]], results[name] = name, clean(data)
    fixtures = []
    for path in folder.glob("*-container.json"):
        data = load(path)
        # allure does not write the status of a teardown that ends after the container is written.
        afters = [{**after, "status": "passed"} for after in clean(data.get("afters", []))]
        if "children" in data:
            befores = clean(data["befores"])
            for before in befores:
                before.get("statusDetails", {}).pop("trace", None)  # The traceback has frames of pytest's plugins.
            fixtures.append((sorted(tests[child] for child in data["children"]), befores, afters))
    return results, sorted(fixtures, key=repr)


def test_allure_has_one_result_for_each_test(pair: Pair) -> None:
    pair.plugin("allure_pytest")
    pair.write("test_it.py", _SUITE)
    # Ranks must neither empty the folder nor write to it: the driver writes there at the same time.
    options = "--alluredir=results", "--clean-alluredir"
    plain = pair.plain.run(*options)
    expected, fixtures = _read_results(pair.plain.path / "results")
    run = pair.marked.run(*options, "-n1")
    assert (run.ret, run.outcomes()) == (plain.ret, plain.outcomes())
    results, merged_fixtures = _read_results(pair.marked.path / "results")
    assert results.keys() == expected.keys()
    differs = results.pop("test_differs_by_rank")
    for name, result in results.items():
        details, expected_result = result.pop("statusDetails", {}), dict(expected[name])
        expected_details = expected_result.pop("statusDetails", {})
        assert result == expected_result
        assert details.get("message") == expected_details.get("message")
        # allure strips the traceback of a plain test.
        trace = details.get("trace", "").removeprefix("ranks 0-1 of 2 on cpu\n").strip()
        assert trace.startswith(expected_details.get("trace", ""))

    assert [(step["name"], step.get("attachments")) for step in differs["steps"]] == [
        ("all", None),
        ("of 0", [{"name": "note", "source": "words of 0"}]),
    ]
    assert "attachments" not in differs
    assert differs["parameters"] == [{"name": "rank", "value": "0"}]
    assert differs["labels"] == expected["test_differs_by_rank"]["labels"]
    # Each marked test has the fixtures that it uses; the teardown of one that other tests share is left out.
    used = [(test, befores[0]["name"]) for tests, befores, _ in merged_fixtures for test in tests]
    assert sorted(used) == sorted((test, befores[0]["name"]) for tests, befores, _ in fixtures for test in tests)
