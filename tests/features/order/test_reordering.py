"""Tests of ``accel_schedule = always``: the order of tests without xdist, which the tests log."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_MODULE = """
    import pytest


    def note(what):
        with open("order", "a") as file:
            file.write(f"{what}\\n")


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


def test_tests_of_one_world_run_one_after_the_other(suite: Suite) -> None:
    suite.write("test_a.py", _MODULE)
    suite.write("test_b.py", _MODULE)
    run = suite.run("-o", "accel_schedule=always")
    assert run.count() == {"PASSED": 12, "SKIPPED": 2}
    in_devices, plain, in_one = ["all", "all again"], ["plain", "plain in class"], ["one", "one more"]
    assert suite.read("order") == [*in_devices * 2, *plain * 2, *in_one * 2]
    places = [name.partition("::")[0] for name in run.results if name.endswith(("plain", "missing"))]
    assert places == ["test_a.py"] * 3 + ["test_b.py"] * 3
