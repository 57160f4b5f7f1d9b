"""Tests of ``accel_schedule = always``: the order of tests without xdist, which the tests and their fixtures log."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_MODULE = """
    import os

    import pytest
    from log import note


    @pytest.fixture(scope="module", autouse=True)
    def module(request):
        note("begin " + request.module.__name__[5:])
        yield
        note("end " + request.module.__name__[5:])


    @pytest.mark.devices(4)
    def test_all():
        note("all")


    def test_plain():
        note("plain")


    class TestClass:
        @pytest.mark.devices(1)
        def test_one(self):
            note("one")

        def test_plain(self):
            note("plain in class")

        @pytest.mark.devices(99)
        def test_missing(self):
            note("missing")

        @pytest.mark.devices(1)
        def test_one_more(self):
            note("one more")


    @pytest.mark.devices(4)
    def test_all_again():
        note("all again")
    """


@pytest.fixture
def logging_suite(suite: Suite) -> Suite:
    """Provide a suite of two equal modules whose tests and module fixtures append lines to the file ``order``."""
    suite.write(
        "log.py",
        """
        import os
        import sys
        from pathlib import Path

        FILE = Path(__file__).parent / "order"


        def note(what):
            with FILE.open("a") as file:
                file.write(f"{what} {os.getpid()}\\n")
        """,
    )
    suite.ini("pythonpath = .")
    suite.write("test_a.py", _MODULE)
    suite.write("test_b.py", _MODULE)
    return suite


_ALL = ["all", "all again"]
_PLAIN = ["plain", "plain in class"]
_ONE = ["one", "one more"]


def _test_order(suite: Suite) -> list[str]:
    """Return what the tests have logged, without the lines of fixtures and the process ids."""
    names = [line.rpartition(" ")[0] for line in suite.read("order")]
    return [name for name in names if name.split()[0] not in ("begin", "end")]


def test_tests_of_one_world_run_one_after_the_other(logging_suite: Suite) -> None:
    run = logging_suite.run("-o", "accel_schedule=always")
    assert run.count() == {"PASSED": 12, "SKIPPED": 2}
    assert _test_order(logging_suite) == [*_ALL * 2, *_PLAIN * 2, *_ONE * 2]
    places = [name.partition("::")[0] for name in run.results if name.endswith(("plain", "missing"))]
    assert places == ["test_a.py"] * 3 + ["test_b.py"] * 3
    by_process: dict[str, list[str]] = {}
    for line in logging_suite.read("order"):
        what, _, process = line.rpartition(" ")
        by_process.setdefault(process, []).append(what)
    assert len(by_process) == 3
    for lines in by_process.values():  # Each process sets up each module once.
        assert [line for line in lines if line.split()[0] in ("begin", "end")] == [
            "begin a",
            "end a",
            "begin b",
            "end b",
        ]
