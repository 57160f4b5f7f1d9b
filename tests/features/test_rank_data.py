"""Tests of data that a conftest sends from ranks to the driver with the report of a phase."""

from __future__ import annotations

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rank-sessions.md"


def test_the_metric_in_the_documentation_works(suite: Suite) -> None:
    (conftest,) = re.findall(r"^```python conftest\n(.*?)^```", _PAGE.read_text(), re.DOTALL | re.MULTILINE)
    suite.write("conftest.py", conftest)
    suite.write(
        "test_metric.py",
        """
        import threading

        import pytest

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_waits(rank):
            threading.Event().wait(2 * rank)

        def test_plain():
            pass
        """,
    )
    run = suite.run("--junitxml=junit.xml", "-o", "junit_family=xunit1", "-n", "1")
    assert run.count() == {"PASSED": 2}
    found = {
        case.get("name"): [value.get("value") for value in case.iter("property") if value.get("name") == "slowest rank"]
        for case in xml.etree.ElementTree.parse(suite.path / "junit.xml").iter("testcase")
    }
    assert [re.sub(r"\d\.\d+", "T", value or "") for value in found["test_waits"]] == ["1: T s"]
    assert found["test_plain"] == []


@pytest.mark.long
def test_data_of_each_phase_and_rank_is_merged(suite: Suite) -> None:
    suite.write(
        "conftest.py",
        """
        from tests.inner import note

        def pytest_accel_rank_data(item, report):
            from os import environ
            return {"plain": [report.when, report.outcome, {"deep": (None, True, 1.5, b"x")}], "rank": environ["RANK"]}

        def pytest_accel_merge(item, report, rank_data):
            for rank, data in rank_data.items():
                note("merged.log", item.name, report.when, rank, data)
        """,
    )
    suite.write(
        "test_phases.py",
        """
        import os

        import pytest

        pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)

        def test_fails(rank):
            assert rank == 0

        def test_dies(rank):
            if rank == 1:
                os._exit(0)
        """,
    )
    run = suite.run()
    assert run.outcomes() == {"test_fails": "FAILED", "test_dies": "FAILED"}
    value = "[{!r}, {!r}, {{'deep': (None, True, 1.5, b'x')}}]"
    lines = suite.read("merged.log")
    assert lines[:6] == [
        f"test_fails {when} {rank} {{'plain': {value.format(when, outcome)}, 'rank': '{rank}'}}"
        for when, outcomes in (("setup", "pp"), ("call", "pf"), ("teardown", "pp"))
        for rank, outcome in enumerate({"p": "passed", "f": "failed"}[letter] for letter in outcomes)
    ]
    assert not [line for line in lines[6:] if line.startswith("test_dies call 1")]


@pytest.mark.long
def test_wrong_data_and_errors_in_data_hooks_fail_the_test(suite: Suite) -> None:
    suite.write(
        "conftest.py",
        """
        import pathlib

        def pytest_accel_rank_data(item, report):
            if report.when == "call":
                if item.name == "test_raises":
                    raise ValueError("no value")
                return {"value": {"where": [pathlib.Path("a")]} if item.name == "test_type" else 5}

        def pytest_accel_merge(item, report, rank_data):
            if item.name == "test_merge_raises":
                raise ZeroDivisionError("cannot merge")
            if item.name == "test_merge_fails":
                report.outcome, report.longrepr = "failed", "the values differ"
        """,
    )
    suite.write(
        "sub/conftest.py",
        """
        def pytest_accel_rank_data(item, report):
            return {"value": 1}
        """,
    )
    suite.write(
        "test_data.py",
        """
        import pytest

        # xfail is for failures of the test itself.
        pytestmark = [pytest.mark.distributed(2, kind="cpu", init=False), pytest.mark.xfail]

        def test_type(): pass
        def test_raises(): pass
        def test_merge_raises(): pass
        def test_merge_fails(): pass
        """,
    )
    suite.write(
        "sub/test_twice.py",
        """
        import pytest

        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_twice(): pass
        """,
    )
    run = suite.run()
    run.expect(
        dict.fromkeys(("test_type", "test_raises", "test_merge_raises", "test_merge_fails", "test_twice"), "FAILED")
    )
    assert "returned value=... with a value that is not plain" in run.failure("test_type")
    assert "pytest_accel_rank_data raised ValueError: no value" in run.failure("test_raises")
    assert "pytest_accel_merge raised ZeroDivisionError: cannot merge" in run.failure("test_merge_raises")
    assert "the values differ" in run.failure("test_merge_fails")
    assert "two implementations returned the key 'value'" in run.failure("test_twice")
