"""Tests of fixtures of marked tests: they run in ranks, and never in the driver, also with plugins that wrap phases."""

from __future__ import annotations

import importlib.util

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_CONFTEST = """
import os

import pytest
from tests.inner import note

PROCESS = "rank" if "RANK" in os.environ else "driver"


@pytest.fixture
def of_function():
    note("fixtures.log", "function", PROCESS)


@pytest.fixture(scope="class")
def of_class():
    note("fixtures.log", "class", PROCESS)


@pytest.fixture(scope="module")
def of_module():
    note("fixtures.log", "module", PROCESS)


@pytest.fixture(scope="session")
def of_session():
    note("fixtures.log", "session", PROCESS)


@pytest.fixture(autouse=True)
def always(request):
    note("fixtures.log", "always", PROCESS)


def ask(item, phase):
    # What a plugin or a conftest may ask of an item; the rank has an item too.
    if "RANK" in os.environ:
        return
    assert not item.funcargs
    known = sorted(set(item.fixturenames) & {"of_function", "of_class", "of_module", "of_session", "always"})
    mark = item.get_closest_marker("distributed").args
    params = item.callspec.params if hasattr(item, "callspec") else {}
    note("items.log", phase, item.originalname, item.location[1:], mark, params, item.function.__doc__, *known)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    ask(item, "setup")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    ask(item, "call")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    ask(item, "teardown")
    return (yield)
"""
_TESTS = """
import pytest

pytestmark = [
    pytest.mark.distributed(2, kind="cpu", init=False),
    pytest.mark.usefixtures("of_function", "of_class", "of_module", "of_session"),
]


@pytest.mark.parametrize("number", [1])
def test_plain(number, of_function, rank):
    "Says what it does."


class TestClass:
    def test_method(self, of_module):
        pass
"""
_HYPOTHESIS_TEST = """

from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=2, deadline=None, database=None)
@given(x=st.integers())
def test_given(x, rank, of_class, of_module, of_session):
    pass
"""
_ASYNC_TEST = """

@pytest.mark.%s
async def test_%s(of_module):
    pass


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"
"""


def test_no_fixture_of_a_marked_test_runs_in_the_driver(suite: Suite) -> None:
    suite.all_plugins()
    suite.write("conftest.py", _CONFTEST)
    text, count = _TESTS, 2
    if importlib.util.find_spec("hypothesis") is not None:
        text, count = text + _HYPOTHESIS_TEST, count + 1
    for plugin, mark in (("pytest_asyncio", "asyncio"), ("anyio", "anyio"), ("pytest_trio", "trio")):
        if importlib.util.find_spec(plugin) is not None:
            text, count = text + _ASYNC_TEST % (mark, mark), count + 1
    suite.write("test_fixtures.py", text)
    assert suite.run().count() == {"PASSED": count}
    ran = suite.read("fixtures.log")
    assert {line.split()[0] for line in ran} == {"function", "class", "module", "session", "always"}
    assert {line.split()[1] for line in ran} == {"rank"}
    lines = suite.read("items.log")
    assert len(lines) == 3 * count
    fixtures = "always of_class of_function of_module of_session"
    for phase in ("setup", "call", "teardown"):
        assert f"{phase} test_plain (9, 'test_plain[1]') (2,) {{'number': 1}} Says what it does. {fixtures}" in lines


def test_a_hook_of_the_driver_that_fails_after_the_setup_decides_the_outcome(suite: Suite) -> None:
    """The ranks run the call meanwhile, and the next test uses them. A hook's time is no part of a timeout."""
    suite.write(
        "conftest.py",
        """
        import os

        import pytest
        from pytest_accel.core.clock import monotonic
        from pytest_accel.diagnostics import waiting_limits
        from pytest_accel.driver import rank_monitor, world

        passed = 0


        def clock():
            return monotonic() + passed


        waiting_limits.monotonic = rank_monitor.monotonic = world.monotonic = clock


        def in_driver(item, name):
            return item.originalname == name and "RANK" not in os.environ


        @pytest.hookimpl(trylast=True)
        def pytest_runtest_setup(item):
            if in_driver(item, "test_setup_hook"):
                raise ValueError("in a hook after the setup")
            if in_driver(item, "test_slow_hook"):
                global passed
                passed = 1000


        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(item):
            if in_driver(item, "test_call_hook"):
                raise ValueError("in a wrapper of the call")
            if in_driver(item, "test_skipping_hook") or in_driver(item, "test_dies"):
                pytest.skip("in a wrapper of the call")
            return (yield)
        """,
    )
    suite.write(
        "test_hooks.py",
        """
        import os
        import time
        import unittest

        import pytest
        from tests.inner import note

        pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)


        @pytest.fixture(autouse=True)
        def around(request):
            yield
            note("torn down", request.node.originalname, os.getpid())


        def test_setup_hook():
            pass


        def test_call_hook():
            pass


        def test_skipping_hook():
            pass


        class TestCase(unittest.TestCase):
            def test_call_hook(self):
                pass


        def test_passes(rank, gather):
            assert gather(rank) == [0, 1]


        @pytest.fixture
        def slow_teardown():
            yield
            time.sleep(1)  # The driver looks at the clock.


        @pytest.mark.distributed(2, kind="cpu", init=False, timeout=60)
        def test_slow_hook(slow_teardown, record_property):
            record_property("large", "x" * 3_000_000)  # The rank waits until the driver reads its report.


        def test_dies(rank):
            if rank == 1:
                os._exit(3)
        """,
    )
    run = suite.run("-rs")
    assert {test.partition("::")[2]: words for test, words in run.results.items()} == {
        "test_setup_hook": ["ERROR"],
        "test_call_hook": ["FAILED"],
        "test_skipping_hook": ["SKIPPED"],
        "TestCase::test_call_hook": ["FAILED"],
        "test_passes": ["PASSED"],
        "test_slow_hook": ["PASSED"],
        "test_dies": ["SKIPPED", "ERROR"],
    }, run.text
    assert "\nrank 1 exited with status 3\n" in run.failure("test_dies")  # Not: in the teardown phase.
    assert "ValueError: in a hook after the setup" in run.failure("test_setup_hook")
    assert "ValueError: in a wrapper of the call" in run.failure("test_call_hook")
    torn_down = [line.split() for line in suite.read("torn down")]
    assert len(torn_down) == 13, run.text
    assert len({pid for _, pid in torn_down}) == 2, "the ranks were replaced"
