"""Tests of pytest-html, pytest-cov and pytest-randomly with marked tests."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite


@needs("pytest_html")
def test_html_and_junit_reports_contain_marked_tests(suite: Suite) -> None:
    suite.plugin("pytest_metadata.plugin")
    suite.plugin("pytest_html.plugin")
    suite.write(
        "test_report.py",
        """
        import pytest

        pytestmark = pytest.mark.distributed(2, device="cpu")


        def test_passes(rank):
            print("words of rank", rank)


        def test_fails(rank):
            print("words of rank", rank)
            assert rank == 0


        def test_skips():
            pytest.skip("not today")
        """,
    )
    run = suite.run("--html=report.html", "--self-contained-html", "--junitxml=junit.xml", "-n2")
    assert run.count() == {"PASSED": 1, "FAILED": 1, "SKIPPED": 1}
    page = (suite.path / "report.html").read_text()
    for text in ("test_passes", "test_fails", "test_skips", "words of rank 1", "rank 1 of 2 on cpu"):
        assert text in page, text
    cases = xml.etree.ElementTree.parse(suite.path / "junit.xml").findall(".//testcase")
    assert sorted(case.attrib["name"] for case in cases) == ["test_fails", "test_passes", "test_skips"]


@needs("pytest_cov")
@pytest.mark.parametrize("workers", [pytest.param((), marks=pytest.mark.nightly), ("-n1",)], ids=["no-xdist", "xdist"])
def test_coverage_of_driver_and_ranks_is_combined(suite: Suite, workers: tuple[str, ...]) -> None:
    suite.plugin("pytest_cov.plugin")
    suite.write(
        "product.py",
        """
        def here():
            return 1


        def there():
            return 2
        """,
    )
    suite.write(
        "test_product.py",
        """
        import product
        import pytest


        @pytest.mark.distributed(2, device="cpu")
        def test_there():
            assert product.there() == 2


        def test_here():
            assert product.here() == 1
        """,
    )
    run = suite.run("--cov=product", "--cov-report=json:cover.json", "--cov-report=term", *workers)
    assert run.count() == {"PASSED": 2}
    cover = json.loads((suite.path / "cover.json").read_text())
    assert {2, 3, 6} <= set(cover["files"]["product.py"]["executed_lines"])
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
    run = suite.run("--randomly-seed=12")
    assert run.count() == {"PASSED": 8}
    order = [int(name.partition("[")[2][:-1]) for name in run.results]
    assert sorted(order) == list(range(8))
    assert order != sorted(order)
    run = suite.run("-n1")
    assert run.count() == {"PASSED": 8}
