"""Tests of the order in which xdist's workers run tests. The tests log this order."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

pytest.importorskip("xdist")

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_LOG = """
    import os


    def note(name):
        with open("order", "a") as file:
            file.write(f"{name} {os.environ.get('PYTEST_XDIST_WORKER')}\\n")
    """
_MIXED = """
    import pytest
    from log import note


    @pytest.mark.parametrize("number", range(4))
    def test_plain(number):
        note("plain")


    @pytest.mark.parametrize("number", range(4))
    @pytest.mark.devices(1)
    def test_one(number):
        note("one")


    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.devices(2)
    def test_two(number):
        note("two")


    @pytest.mark.devices(4)
    def test_four():
        note("four")


    @pytest.mark.devices(99)
    def test_missing():
        note("missing")
    """


def _write_suite(suite: Suite, text: str) -> None:
    """Write a suite with one test file, `text`, and the module ``log`` by which its tests log their names."""
    suite.write("log.py", _LOG)
    suite.write("test_suite.py", text)
    suite.ini("pythonpath = .")


def _logged_names(suite: Suite) -> list[str]:
    """Return the names that tests have logged, in their order."""
    return [line.split()[0] for line in suite.read("order")]


def test_tests_with_many_devices_run_first(suite: Suite) -> None:
    _write_suite(suite, _MIXED)
    run = suite.run("-n3")
    assert run.count() == {"PASSED": 12, "SKIPPED": 1}
    order = _logged_names(suite)
    assert Counter(order) == {"plain": 4, "one": 4, "two": 3, "four": 1}
    with_devices = [name for name in order if name not in ("plain", "one")]
    assert with_devices == ["four", "two", "two", "two"]
    assert order.index("one") > order.index("four")
    assert "AccelScheduling" in run.text


@pytest.mark.long
def test_scheduling_can_be_switched_off(suite: Suite) -> None:
    _write_suite(suite, _MIXED)
    assert "scheduling tests via LoadScheduling" in suite.run("-n1", "-o", "accel_schedule=off").text


def test_each_test_runs_once_if_a_worker_crashes(suite: Suite) -> None:
    _write_suite(
        suite,
        """
        import os

        import pytest
        from log import note


        @pytest.mark.parametrize("number", range(6))
        def test_plain(number):
            note(f"plain{number}")
            if number == 3:
                os._exit(1)


        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.devices(2)
        def test_two(number):
            note(f"two{number}")
        """,
    )
    run = suite.run("-n2", "-rf")
    assert re.search(r"worker 'gw\d' crashed while running 'test_suite.py::test_plain\[3\]'", run.text)
    assert "1 failed, 9 passed" in run.text
    assert set(Counter(_logged_names(suite)).values()) == {1}


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (("-n2",), 10),
        # The ranks begin a test before the worker knows the test that follows it.
        pytest.param(("-n1", "--dist=loadfile"), 6, marks=pytest.mark.long),
    ],
)
def test_a_worker_and_its_ranks_keep_the_fixtures_of_the_module_with_which_the_worker_stays(
    suite: Suite, options: tuple[str, ...], most: int
) -> None:
    """An error of a teardown that was put off is not lost, either."""
    suite.write("log.py", _LOG)
    suite.ini("pythonpath = .")
    for name in ("a", "b", "c"):
        suite.write(
            f"test_{name}.py",
            """
            import pytest
            from log import note


            @pytest.fixture(scope="module")
            def module():
                note("begin")
                yield
                assert __name__ != "test_c", "in teardown"


            @pytest.mark.parametrize("number", range(6))
            @pytest.mark.devices(1)
            def test_it(module, number):
                pass


            @pytest.mark.parametrize("number", range(6))
            def test_plain(module, number):
                pass
            """,
        )
    run = suite.run(*options)
    assert run.count()["PASSED"] == 36
    assert 6 <= len(suite.read("order")) <= most
    assert "in teardown" in run.text
    assert run.ret == pytest.ExitCode.TESTS_FAILED


def test_tests_of_equal_needs_share_worlds(suite: Suite) -> None:
    """A world whose devices another request has wanted, and no longer wants, stays: tests of 4 needs had 50 worlds."""
    suite.write(
        "test_it.py",
        """
        import pytest


        def make(ranks):
            @pytest.mark.distributed(ranks, init=False)
            @pytest.mark.parametrize("number", range(5))
            def test(number):
                pass

            return test


        test_1, test_2, test_3, test_4 = map(make, (1, 2, 3, 4))
        """,
    )
    run = suite.run("-n3", "--accel=sim:8", "--accel-record=record.jsonl", "-p", "no:randomly")
    assert run.count() == {"PASSED": 20}, run.text
    starts = [line for line in suite.read("record.jsonl") if "WorldStarting" in line]
    assert 4 <= len(starts) <= 14


@pytest.mark.long
def test_durations_are_remembered_and_used(suite: Suite) -> None:
    _write_suite(
        suite,
        """
        import pytest
        from log import note


        @pytest.mark.parametrize("number", range(6))
        @pytest.mark.devices(4)
        def test_all(number):
            note(number)


        def test_plain():
            pass


        def test_fails():
            assert False
        """,
    )
    run = suite.run("-n2")
    assert run.count() == {"PASSED": 7, "FAILED": 1}
    path = suite.path / ".pytest_cache" / "v" / "accel" / "durations"
    found = json.loads(path.read_text())
    assert set(found) == {"test_suite.py::test_plain", *(f"test_suite.py::test_all[{number}]" for number in range(6))}
    assert all(len(times) == 1 and times[0][1] >= 0 for times in found.values())

    for number in range(6):
        found[f"test_suite.py::test_all[{number}]"] = [(1.0, 10.0 * (number + 1))]
    path.write_text(json.dumps(found))
    (suite.path / "order").unlink()
    suite.run("-n2")
    assert _logged_names(suite) == ["5", "4", "3", "2", "1", "0"]
    assert len(json.loads(path.read_text())["test_suite.py::test_all[0]"]) == 2
