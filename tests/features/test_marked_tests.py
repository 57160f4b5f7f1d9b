"""Tests of where marks may be written, and of the errors for wrong arguments."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")


def test_marks_apply_to_functions_classes_modules_and_parameters(suite: Suite) -> None:
    suite.write(
        "test_marks.py",
        """
        import os
        import unittest

        import pytest
        from tests.inner import note


        @pytest.mark.parametrize(
            "expected",
            [
                pytest.param(1, marks=pytest.mark.distributed(1, init=False), id="one"),
                pytest.param(3, marks=pytest.mark.distributed(3, init=False), id="three"),
            ],
        )
        def test_parameter(request, expected):
            assert request.getfixturevalue("world_size") == expected


        @pytest.mark.distributed(2, init=False)
        @pytest.mark.parametrize("number", [10, 20])
        def test_other_parameters(number, rank, gather):
            assert gather(number + rank) == [number, number + 1]


        @pytest.mark.distributed(2, init=False)
        class TestCase(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                cls.made_in = int(os.environ["RANK"])

            def setUp(self):
                self.rank = int(os.environ["RANK"])
                self.addCleanup(self.log, "cleanup")

            def tearDown(self):
                self.log("tearDown")

            def log(self, word):
                note(f"unittest.{self.rank}.log", word, self.id().rpartition(".")[2])

            def test_in_ranks(self):
                self.assertEqual(self.made_in, self.rank)

            def test_fails(self):
                self.assertEqual(self.rank, 0, "only rank 0 is right")

            @unittest.skip("not now")
            def test_skipped(self):
                raise AssertionError

            @unittest.expectedFailure
            def test_expected(self):
                raise AssertionError

            @pytest.mark.distributed(3, init=False)
            def test_closer(self):
                self.assertEqual(os.environ["WORLD_SIZE"], "3")


        class Word(str):
            pass


        class Number(int):
            pass


        @pytest.mark.distributed(Number(2), init=False, env={"GREETING": Word("hello")})
        def test_subclasses(world_size):
            assert (world_size, os.environ["GREETING"]) == (2, "hello")


        def test_unmarked():
            assert "WORLD_SIZE" not in os.environ
            assert "SIM_VISIBLE_DEVICES" not in os.environ
        """,
    )
    run = suite.run()
    failed = {name for name, words in run.results.items() if words == ["FAILED"]}
    assert failed == {"test_marks.py::TestCase::test_fails"}
    assert "rank 1: AssertionError: 1 != 0 : only rank 0 is right" in run.text
    assert run.result("TestCase::test_skipped") == "SKIPPED"
    assert run.result("TestCase::test_expected") == "XFAIL"
    for rank in (0, 1):
        assert {"tearDown test_in_ranks", "cleanup test_in_ranks"} < set(suite.read(f"unittest.{rank}.log"))
    assert run.count() == {"PASSED": len(run.results) - 3, "FAILED": 1, "SKIPPED": 1, "XFAIL": 1}


_WRONG_MARKS = """
import unittest

import pytest

from pytest import mark


@mark.distributed([1, 2], at_least=2)
class TestCase(unittest.TestCase):
    def test_sizes(self):
        raise AssertionError("ran")


@mark.distributed(2, nodes=3)
@mark.xfail
def test_nodes():
    raise AssertionError("ran")


@mark.devices(1)
def test_by_rule():
    raise AssertionError("ran")


@mark.distributed(2)
@pytest.mark.parametrize("world_size", [7])
def test_parameter(world_size):
    raise AssertionError("ran")


@mark.needs("license")
def test_needs():
    raise AssertionError("ran")


@mark.distributed(2, kind="cpu", init=False)
def test_right():
    pass


def test_unmarked():
    pass
"""
_WRONG = ("TestCase.test_sizes", "test_nodes", "test_by_rule", "test_parameter[7]", "test_needs")


def test_a_test_with_a_wrong_mark_fails_and_the_others_run(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/core/test_marks.py` has the texts."""
    monkeypatch.setenv("COLUMNS", "300")
    suite.ini('accel_rules = test_wrong.py::test_by_rule: distributed(4, backend="fake")')
    suite.write("test_wrong.py", _WRONG_MARKS)
    run = suite.run("-Wignore::pytest.PytestUnknownMarkWarning")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    names = [name.rpartition(".")[2] for name in _WRONG]
    run.expect({**dict.fromkeys(names, "ERROR"), "test_right": "PASSED", "test_unmarked": "PASSED"})
    for name in _WRONG:
        assert "@pytest.mark." in run.failure(name)
        nodeid = f"test_wrong.py::{name.replace('.', '::')}"
        assert f"\nERROR {nodeid} - @pytest.mark." in run.text
    text = "accel_resources, which names the resources of tests, is not set in the ini file"
    assert text in run.failure("test_needs")
