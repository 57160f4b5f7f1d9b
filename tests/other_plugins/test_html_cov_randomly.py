"""Tests of pytest-html, pytest-cov and pytest-randomly with marked tests."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite


@needs("pytest_html", "pytest_cov")
def test_reports_of_html_junit_and_coverage_contain_marked_tests(suite: Suite) -> None:
    suite.plugin("pytest_metadata.plugin")
    suite.plugin("pytest_html.plugin")
    suite.plugin("pytest_cov.plugin")
    suite.write("product.py", "def here():\n    return 1\n\n\ndef there():\n    return 2\n")
    suite.write(
        "test_report.py",
        """
        import product
        import pytest

        marked = pytest.mark.distributed(2, device="cpu")


        @marked
        def test_passes(rank):
            print("words of rank", rank)
            assert product.there() == 2


        @marked
        def test_fails(rank):
            print("words of rank", rank)
            assert rank == 0


        @marked
        def test_skips():
            pytest.skip("not today")


        def test_unmarked():
            assert product.here() == 1
        """,
    )
    reports = ("--html=report.html", "--self-contained-html", "--junitxml=junit.xml")
    run = suite.run(*reports, "--cov=product", "--cov-report=json:cover.json", "--cov-report=term", "-n2")
    assert run.count() == {"PASSED": 2, "FAILED": 1, "SKIPPED": 1}
    page = (suite.path / "report.html").read_text()
    for text in ("test_passes", "test_fails", "test_skips", "words of rank 1", "rank 1 of 2 on cpu"):
        assert text in page, text
    cases = xml.etree.ElementTree.parse(suite.path / "junit.xml").findall(".//testcase")
    assert sorted(case.attrib["name"] for case in cases) == [
        *("test_fails", "test_passes", "test_skips", "test_unmarked")
    ]
    cover = json.loads((suite.path / "cover.json").read_text())
    assert {2, 6} <= set(cover["files"]["product.py"]["executed_lines"])
    assert not list(suite.path.glob(".coverage.*"))


@needs("pytest_randomly")
def test_pytest_randomly_uses_one_seed_in_all_ranks(suite: Suite) -> None:
    suite.plugin("pytest_randomly")
    suite.write(
        "test_random.py",
        """
        import random

        import pytest

        pytestmark = pytest.mark.distributed(2, device="cpu")


        @pytest.mark.parametrize("number", range(8))
        def test_draws(number, gather):
            drawn = gather(random.random())
            assert drawn[0] == drawn[1]
        """,
    )
    run = suite.run("--randomly-seed=12", "-n1")
    assert run.count() == {"PASSED": 8}
    order = [int(name.partition("[")[2][:-1]) for name in run.results]
    assert sorted(order) == list(range(8))
    assert order != sorted(order)
