"""Marked tests among other plugins."""

from __future__ import annotations

import importlib.util
import json
import re
import xml.etree.ElementTree
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Suite


def _needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


_FLAKY = """
    import os
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, device="cpu")


    class Flaky(Exception):
        pass


    def times(name):
        path = Path(f"{name}.{os.environ['RANK']}")
        path.write_text(f"{path.read_text()}x" if path.exists() else "x")
        return len(path.read_text())


    @pytest.fixture
    def counted():
        times("setup")


    %s
    def test_once(rank, counted):
        if times("once") == 1 and rank == 1:
            raise Flaky("the first time")


    %s
    def test_always():
        raise ValueError("every time")


    %s
    def test_dies(rank):
        if times("dies") == 1 and rank == 1:
            os._exit(3)


    %s
    def test_stable():
        pass
    """


@_needs("pytest_rerunfailures")
def test_reruns(suite: Suite) -> None:
    suite.all_plugins()
    suite.write("test_flaky.py", _FLAKY % ("", "", "", ""))
    run = suite.run("--reruns=1")
    assert {name.partition("::")[2]: words for name, words in run.words.items()} == {
        "test_once": ["RERUN", "PASSED"],
        "test_always": ["RERUN", "FAILED"],
        "test_dies": ["RERUN", "PASSED"],
        "test_stable": ["PASSED"],
    }
    assert "1 failed, 3 passed, 3 rerun" in run.text
    for rank in (0, 1):
        assert suite.read(f"setup.{rank}") == ["xx"]  # All of the test is run again, and only as often as it is said.


@pytest.mark.long
@_needs("pytest_rerunfailures")
def test_reruns_of_some(suite: Suite) -> None:
    suite.all_plugins()
    flaky = "@pytest.mark.flaky(reruns=2, only_rerun='Flaky')"
    suite.write("test_flaky.py", _FLAKY % (flaky, flaky, flaky, ""))
    run = suite.run("-n1")
    assert {name.partition("::")[2]: words for name, words in run.words.items()} == {
        "test_once": ["RERUN", "PASSED"],
        "test_always": ["FAILED"],
        "test_dies": ["FAILED"],
        "test_stable": ["PASSED"],
    }
    for name in ("once", "dies"):
        (suite.path / f"{name}.1").unlink()
    (suite.path / "test_flaky.py").write_text((suite.path / "test_flaky.py").read_text().replace(flaky, ""))
    run = suite.run("--reruns=1", "--only-rerun=ValueError: every", "-k", "once or always")
    assert run.word("test_once") == "FAILED"
    assert run.word("test_always") == "RERUN FAILED"


@_needs("pytest_timeout")
def test_timeouts_of_pytest_timeout(suite: Suite) -> None:
    suite.all_plugins()
    suite.write(
        "test_slow.py",
        """
        import threading

        import pytest

        pytestmark = pytest.mark.distributed(2, device="cpu")


        def test_before():
            pass


        @pytest.mark.timeout(1)
        def test_hangs(rank):
            if rank == 1:
                threading.Event().wait()


        def test_after():
            pass


        @pytest.mark.timeout(30)
        def test_in_time():
            pass


        @pytest.mark.timeout(1, method="thread")
        def test_hangs_and_the_session_goes_on(rank):
            if rank == 0:
                threading.Event().wait()


        @pytest.mark.timeout(1, func_only=True)
        def test_hangs_in_its_function(rank):
            threading.Event().wait()


        @pytest.mark.timeout(0)
        def test_has_no_limit():
            pass
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": 4, "FAILED": 3}
    for test, who in (
        ("test_hangs", "rank 1"),
        ("test_hangs_and_the_session_goes_on", "rank 0"),
        ("test_hangs_in_its_function", "ranks 0-1"),
    ):
        assert f"{who} did not finish the call phase within 1 s (timeout)" in run.failure(test)
    told = run.failure("test_hangs")
    assert "[rank 1] stacks" in told
    assert re.search(r"test_slow.py\", line 16 in test_hangs|test_hangs \(test_slow.py:16\)", told)  # With py-spy.


@_needs("pytest_html")
def test_reports_for_people_and_machines(suite: Suite) -> None:
    suite.all_plugins()
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


@_needs("pytest_cov")
@pytest.mark.parametrize("how", [pytest.param((), marks=pytest.mark.long), ("-n1",)], ids=["plain", "xdist"])
def test_coverage_of_the_driver_is_kept(suite: Suite, how: tuple[str, ...]) -> None:
    suite.all_plugins()
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
    run = suite.run("--cov=product", "--cov-report=json:cover.json", "--cov-report=term", *how)
    assert run.count() == {"PASSED": 2}
    cover = json.loads((suite.path / "cover.json").read_text())
    assert {2, 3, 6} <= set(cover["files"]["product.py"]["executed_lines"])
    assert not list(suite.path.glob(".coverage.*"))


@_needs("pytest_randomly")
def test_one_seed_for_all_ranks(suite: Suite) -> None:
    suite.all_plugins(shuffle=True)
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
            with open("order.log", "a") as file:
                print(number, file=file)
        """,
    )
    run = suite.run("--randomly-seed=12")
    assert run.count() == {"PASSED": 8}
    order = [int(name.partition("[")[2][:-1]) for name in run.words]
    assert sorted(order) == list(range(8))
    assert order != sorted(order)
    run = suite.run("-n1")
    assert run.count() == {"PASSED": 8}


@pytest.mark.parametrize("options", [(), pytest.param(("-n", "1"), marks=_needs("xdist"))])
def test_a_mark_of_the_projects_own_is_told_once(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    distributed: needs a cluster\n    slow: takes long")
    pytester.makeconftest("def pytest_configure(config): config.addinivalue_line('markers', 'devices(n): needs some')")
    pytester.makepyfile("def test_plain(): pass")

    result = pytester.runpytest_subprocess("--accel", "none", *options)

    assert [line for line in result.outlines if line.startswith("accel: this project")] == [
        f"accel: this project registers a mark `{name}` of its own; with this plugin it {does}. "
        "`-p no:accel` leaves it alone: docs/how-to/adopt-a-suite.md"
        for name, does in (("devices", "runs tests with leased devices"), ("distributed", "runs tests in ranks"))
    ]


def test_the_plugins_own_marks_are_not_told_of(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_plain(): pass")
    pytester.runpytest_subprocess("--accel", "none").stdout.no_fnmatch_line("*registers a mark*")


def test_without_plugins_of_pytests_own(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest

        def test_keeps(cache):
            cache.set("mine", 7)

        @pytest.mark.distributed(2)
        def test_in_ranks(rank):
            assert rank < 2

        def test_has_kept(cache):
            assert cache.get("mine", None) == 7
        """,
    )
    run = suite.run("-p", "no:capture", "-p", "no:debugging", "--cache-clear")
    assert run.count() == {"PASSED": 3}
