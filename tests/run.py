"""The result of a pytest session that a test has run, read from its output with ``-v``."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

_RESULTS = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|RERUN|SUBPASSED|SUBFAILED|SUBSKIPPED"
_RESULT_LINES = (
    re.compile(rf"^(?P<test>\S+::.+?) (?P<word>{_RESULTS})\b", re.MULTILINE),
    re.compile(rf"^\[gw\d+\] (?:\[ *\d+%\] )?(?P<word>{_RESULTS}) (?P<test>\S+::.+?)(?: <- .*| \(.*)?$", re.MULTILINE),
)
_CAUSES = "causes.xml"
CAUSES = f"--junitxml={_CAUSES}"
"""Option with which a session reports the causes of failures, for `Run.causes`."""
OUTER_VARIABLES = re.compile(
    r"PYTEST_(?!DEBUG_TEMPROOT)|COV_CORE|COVERAGE_|\w+_VISIBLE_DEVICES$"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_[A-Z]+|OMP_NUM_THREADS|GLOO_SOCKET_IFNAME)$"
)
"""Environment variables that an outer session, a launcher or the user may have set. Sessions do not inherit them."""


@dataclass(frozen=True)
class Run:
    """The exit status and the output of a session that has ended."""

    ret: int
    text: str
    errors: str = ""
    """The session's standard error; empty if it is part of `text`."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """The causes of each failed test, in order of time, by its name; empty for a session without the option `CAUSES`.
    """

    @cached_property
    def results(self) -> dict[str, list[str]]:
        """The results that ``-v`` has shown for each test id, in order of time."""
        results: dict[str, list[str]] = {}
        for pattern in _RESULT_LINES:
            for match in pattern.finditer(self.text):
                results.setdefault(match["test"].strip(), []).append(match["word"])
        return results

    def result(self, test: str) -> str:
        """Return the results of `test`, joined by spaces. `test` is a test id, or its part after a ``::``."""
        found = [words for name, words in self.results.items() if name == test or name.endswith(f"::{test}")]
        assert len(found) == 1, f"{test}: expected one test of this name, found {len(found)} in\n{self.text}"
        return " ".join(found[0])

    def outcomes(self) -> dict[str, str]:
        """Return the results of each test, joined by spaces, by the part of its id after the last ``::``."""
        outcomes = {name.rpartition("::")[2]: " ".join(words) for name, words in self.results.items()}
        assert len(outcomes) == len(self.results), f"tests of the same name in {list(self.results)}"
        return outcomes

    def count(self) -> dict[str, int]:
        """Return the number of results by result word."""
        return dict(Counter(word for words in self.results.values() for word in words))

    def expect(self, expected: dict[str, str]) -> None:
        """Check that `outcomes` returns `expected`; on failure show the whole output.

        An expected result may have the test's causes after its words: ``FAILED died: SIGKILL; rank 1``.
        """
        outcomes = self.outcomes()
        for name, text in expected.items():
            if not text.isupper() and name in outcomes and name in self.causes:
                outcomes[name] += f" {self.causes[name]}"
        wrong = {name: outcomes.get(name) for name in expected | outcomes if outcomes.get(name) != expected.get(name)}
        if wrong:
            pytest.fail(f"{self.text}\n{wrong}", pytrace=False)

    def failure(self, test: str) -> str:
        """Return the text of all sections that report a failure or an error of `test`, without their headlines."""
        headline = rf"^_+ (?:ERROR at \w+ of )?{re.escape(test)} _+$\n(.*?)(?=^(?:__+ \S.* __+|=+ .* =+)$)"
        found: list[str] = re.findall(headline, self.text, re.MULTILINE | re.DOTALL)
        assert found, f"no failure of {test} in\n{self.text}"
        return "\n".join(found)


def without_subtests(results: Mapping[str, str]) -> dict[str, str]:
    """Return `results` without the words of subtests, whose lines are not read from the output of xdist."""
    return {name: re.sub(r"\bSUB[A-Z]+ ?", "", words).strip() for name, words in results.items()}


def read_causes(folder: Path) -> dict[str, str]:
    """Return the causes of each failed test that a session with the option `CAUSES` in `folder` has reported."""
    path = folder / _CAUSES
    found: dict[str, list[str]] = {}
    if path.exists():
        for case in xml.etree.ElementTree.parse(path).findall(".//testcase"):
            causes = [entry.attrib["value"] for entry in case.findall(".//property[@name='accel_cause']")]
            found.setdefault(case.attrib["name"], []).extend(causes)
    return {name: ", ".join(dict.fromkeys(causes)) for name, causes in found.items() if causes}
