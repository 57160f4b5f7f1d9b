"""Tests of marks that change after the collection: the test would not run as they say, so it fails."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_CONFTEST = """
    import pytest

    TWO = pytest.mark.distributed(2, init=False)


    def mark(items, part):
        for item in items:
            if part in item.name:
                item.add_marker(TWO)


    def pytest_configure(config):
        config.pluginmanager.register(SecondHooks())


    class SecondHooks:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            mark(items, "_modifyitems_trylast")

    # Before the tests run: these marks apply.

    def pytest_itemcollected(item):
        mark([item], "_itemcollected")


    def pytest_generate_tests(metafunc):
        if "generated" in metafunc.fixturenames:
            metafunc.parametrize("generated", [pytest.param(1, marks=TWO)])


    # Too late.

    def pytest_collection_finish(session):
        mark(session.items, "_collection_finish")


    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(item):
        mark([item], "_setup")
        if "_closer" in item.name:
            item.add_marker(pytest.mark.distributed(4, init=False), append=False)
        if "_removed" in item.name:
            item.own_markers[:] = [one for one in item.own_markers if one.name != "distributed"]
        if "_devices" in item.name:
            item.add_marker(pytest.mark.devices(3))


    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item):
        mark([item], "_call_wrapper")
        return (yield)
    """
_TESTS = """
    import os
    import unittest

    import pytest

    ALONE = "RANK" not in os.environ


    def in_ranks():
        assert os.environ["WORLD_SIZE"] == "2"


    # Before the tests run.

    def test_itemcollected(): in_ranks()
    def test_generate(generated): in_ranks()
    def test_modifyitems_trylast(): in_ranks()

    # Too late.

    def test_collection_finish(): pass
    def test_setup(): pass
    def test_call_wrapper(): pass
    def test_devices(): pass

    @pytest.fixture
    def add_marker(request):
        request.node.add_marker(pytest.mark.distributed(2, init=False))

    def test_add_marker(add_marker): pass

    def test_itself(request):
        request.applymarker(pytest.mark.distributed(2, init=False))

    class TestOfUnittest(unittest.TestCase):
        def test_unittest_setup(self): pass

    @pytest.mark.xfail
    def test_xfail_setup(): assert ALONE

    # Marked, and other marks later.

    @pytest.mark.distributed(2, init=False)
    def test_closer(): pass

    @pytest.mark.distributed(2, init=False)
    def test_removed(): pass

    @pytest.mark.distributed(2, init=False)
    def test_marked_devices(): pass

    # The mark changes nothing.

    @pytest.mark.distributed(2, init=False)
    def test_marked_setup(): in_ranks()

    def test_unmarked(): assert ALONE
    """
_RANKS = "distributed(2, init=False)"
_MARKS = {
    "test_devices": ("no mark", "devices(3)"),
    "test_marked_devices": (_RANKS, f"devices(3), {_RANKS}"),
    "test_removed": (_RANKS, "no mark"),
    "test_closer": (_RANKS, "distributed(4, init=False)"),
}
"""The marks of tests at their collection, and when they run, if these are others than none and `_RANKS`."""


def test_marks_that_change_after_collection_fail_their_tests(suite: Suite) -> None:
    suite.write("conftest.py", _CONFTEST)
    path = suite.write("test_late.py", _TESTS)
    run = suite.run()
    before, late, unchanged = (
        re.findall(r"def (test_\w+)", part)
        for part in re.split("# Too late.|# The mark changes nothing.", path.read_text())
    )
    results = {name.partition("[")[0]: result for name, result in run.outcomes().items()}
    assert results == {
        **dict.fromkeys(before + unchanged, "PASSED"),
        **dict.fromkeys(late, "FAILED"),
    }, run.text
    for name in late:
        headline = {"test_unittest_setup": "TestOfUnittest.test_unittest_setup"}
        planned, present = _MARKS.get(name, ("no mark", _RANKS))
        text = re.escape(f"the test had {planned} at its collection, and now has {present}; change marks in ")
        failure = run.failure(headline.get(name, name))
        assert re.search(rf"^test_late\.py:[0-9]+: {text}", failure, re.MULTILINE), failure
