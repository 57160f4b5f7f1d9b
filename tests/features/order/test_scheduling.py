"""Tests of the order of tests on xdist's workers, and in a session without xdist. The tests note this order."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

pytest.importorskip("xdist")

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_MIXED = """
    import pytest
    from tests.inner import note


    @pytest.mark.parametrize("number", range(4))
    def test_plain(number):
        note("order", "plain")


    @pytest.mark.parametrize("number", range(4))
    @pytest.mark.devices(1)
    def test_one(number):
        note("order", "one")


    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.devices(2)
    def test_two(number):
        note("order", "two")


    @pytest.mark.devices(4)
    def test_four():
        note("order", "four")


    @pytest.mark.devices(99)
    def test_missing():
        note("order", "missing")
    """


def test_tests_with_many_devices_run_first(suite: Suite) -> None:
    suite.write("test_suite.py", _MIXED)
    run = suite.run("-n3")
    assert run.count() == {"PASSED": 12, "SKIPPED": 1}
    order = suite.read("order")
    assert Counter(order) == {"plain": 4, "one": 4, "two": 3, "four": 1}
    with_devices = [name for name in order if name not in ("plain", "one")]
    assert with_devices == ["four", "two", "two", "two"]
    assert order.index("one") > order.index("four")
    assert "AccelScheduling" in run.text


@pytest.mark.long
def test_scheduling_can_be_switched_off(suite: Suite) -> None:
    suite.write("test_suite.py", _MIXED)
    assert "scheduling tests via LoadScheduling" in suite.run("-n1", "-o", "accel_schedule=off").text


def test_each_test_runs_once_if_a_worker_crashes(suite: Suite) -> None:
    suite.write(
        "test_suite.py",
        """
        import os

        import pytest
        from tests.inner import note


        @pytest.mark.parametrize("number", range(6))
        def test_plain(number):
            note("order", f"plain{number}")
            if number == 3:
                os._exit(1)


        @pytest.mark.parametrize("number", range(4))
        @pytest.mark.devices(2)
        def test_two(number):
            note("order", f"two{number}")
        """,
    )
    run = suite.run("-n2", "-rf")
    assert re.search(r"worker 'gw\d' crashed while running 'test_suite.py::test_plain\[3\]'", run.text)
    assert "1 failed, 9 passed" in run.text
    assert set(Counter(suite.read("order")).values()) == {1}


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (("-n2",), 15),  # Without it, 36. Workers share a module at the end, as their times allow.
        # The ranks begin a test before the worker knows the test that follows it.
        pytest.param(("-n1", "--dist=loadfile"), 6, marks=pytest.mark.long),
    ],
)
def test_a_worker_and_its_ranks_keep_the_fixtures_of_the_module_with_which_the_worker_stays(
    suite: Suite, options: tuple[str, ...], most: int
) -> None:
    """An error of a teardown that was put off is not lost, either."""
    for name in ("a", "b", "c"):
        suite.write(
            f"test_{name}.py",
            """
            import pytest
            from tests.inner import note


            @pytest.fixture(scope="module")
            def module():
                note("order", "begin")
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
    """How often depends on which test a worker ends first; `tests/leases` says when a world must be given up."""
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
    assert 4 <= len(starts) < 20


@pytest.mark.long
def test_durations_are_remembered_and_used(suite: Suite) -> None:
    suite.write(
        "test_suite.py",
        """
        import pytest
        from tests.inner import note


        @pytest.mark.parametrize("number", range(6))
        @pytest.mark.devices(4)
        def test_all(number):
            note("order", number)


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
    assert suite.read("order") == ["5", "4", "3", "2", "1", "0"]
    assert len(json.loads(path.read_text())["test_suite.py::test_all[0]"]) == 2


def test_tests_of_one_world_run_one_after_the_other_without_xdist(suite: Suite) -> None:
    suite.write("test_a.py", _MIXED)
    suite.write("test_b.py", _MIXED)
    run = suite.run("-o", "accel_schedule=always")
    assert run.count() == {"PASSED": 24, "SKIPPED": 2}
    assert suite.read("order") == [*["plain"] * 8, *["one"] * 8, *["two"] * 6, *["four"] * 2]
    places = [name.partition("::")[0] for name in run.results if "plain" in name or "missing" in name]
    assert places == ["test_a.py"] * 5 + ["test_b.py"] * 5
