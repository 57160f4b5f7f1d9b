"""Tests of pytest-bdd: scenarios whose steps run in ranks."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair

pytestmark = needs("pytest_bdd")

_FEATURE = """
    Feature: Sums
      Scenario: Right
        Given a number of 2
        When it is doubled
        Then it is 4

      Scenario: Wrong in one rank
        Given a number of 2
        When the last process doubles it
        Then it is 2
        And it is 2

      Scenario: Unmarked
        Given a number of 2
        Then it is 2
    """
_STEPS = """
    import os

    import pytest
    from pytest_bdd import given, parsers, scenario, then, when

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, kind="cpu")


    @two
    @scenario("sums.feature", "Right")
    def test_right():
        pass


    @two
    @scenario("sums.feature", "Wrong in one rank")
    def test_wrong():
        pass


    @scenario("sums.feature", "Unmarked")
    def test_unmarked():
        pass


    @given(parsers.parse("a number of {number:d}"), target_fixture="number")
    def number(number):
        return {"value": number}


    @when("it is doubled")
    def double(number):
        number["value"] *= 2


    @when("the last process doubles it")
    def double_in_one(number):
        number["value"] *= 1 + LAST


    @then(parsers.parse("it is {expected:d}"))
    def check(number, expected):
        assert number["value"] == expected
    """


def test_reports_of_marked_and_unmarked_scenarios_are_equal(pair: Pair) -> None:
    pair.plugin("pytest_bdd.plugin")
    pair.write("sums.feature", _FEATURE)
    pair.write("test_sums.py", _STEPS)
    args = ("--cucumberjson=cucumber.json", "--gherkin-terminal-reporter", "-v", "-rpf")
    plain, marked = (one.run(*args) for one in (pair.plain, pair.marked))
    outcomes = [sorted(re.findall(r"^(PASSED|FAILED) (\S+)", run.text, re.MULTILINE)) for run in (plain, marked)]
    assert outcomes[1] == outcomes[0]
    assert [word for word, _ in outcomes[1]] == ["FAILED", "PASSED", "PASSED"]
    assert marked.ret == plain.ret == 1
    assert len(_read_features(pair.plain)[0]["elements"]) == 3
    assert _read_features(pair.marked) == _read_features(pair.plain)

    assert "When the last process doubles it" in marked.text
    shown = [run.text.partition("= FAILURES =")[0] for run in (plain, marked)]
    steps = [[line for line in text.splitlines() if line.startswith("    ")] for text in shown]
    assert steps[0]
    assert steps[1][: len(steps[0])] == steps[0]


def _read_features(suite: Suite) -> Any:
    """Return the features that ``--cucumberjson`` has written, without values that differ from run to run."""
    features = json.loads((suite.path / "cucumber.json").read_text().replace(f"{suite.path.name}/", ""))
    for feature in features:
        for element in feature["elements"]:
            for step in element["steps"]:
                del step["result"]["duration"]
                if "error_message" in step["result"]:
                    step["result"]["error_message"] = "AssertionError" in step["result"]["error_message"]
    return features
