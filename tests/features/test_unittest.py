"""Tests of marked test cases under ``python -m unittest``, which does not apply the marks."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_CASES = """
    import os
    import unittest

    import pytest

    from pytest_accel.unittest_protocol import load_tests


    @pytest.mark.distributed(2, kind="cpu")
    class TestMarked(unittest.TestCase):
        @classmethod
        def setUpClass(cls):
            assert "RANK" in os.environ

        def test_needs_no_peer(self):
            pass


    class TestMethods(unittest.TestCase):
        @pytest.mark.devices(1)
        def test_marked(self):
            pass

        def test_unmarked(self):
            pass


    class TestInherits(TestMarked):
        pytestmark = pytest.mark.usefixtures("rank")
    """


def test_a_marked_test_case_fails_under_unittest(suite: Suite) -> None:
    suite.write("test_cases.py", _CASES)
    suite.write(
        "test_module.py",
        """
        import unittest

        import pytest

        from pytest_accel.unittest_protocol import load_tests

        pytestmark = pytest.mark.distributed


        class TestInMarkedModule(unittest.TestCase):
            def test_it(self):
                pass
        """,
    )
    command = [sys.executable, "-m", "unittest", "-v", "test_cases", "test_module"]
    completed = subprocess.run(command, cwd=suite.path, capture_output=True, text=True, check=False)
    assert completed.returncode == 1
    output = completed.stderr
    assert "FAILED (failures=4)" in output
    for mark in ("distributed(2, kind='cpu')", "devices(1)", "distributed()"):
        assert f"AssertionError: is marked {mark}, which only pytest applies: run it with pytest" in output
    assert "FAIL: test_needs_no_peer (test_cases.TestMarked" in output
    assert "FAIL: test_needs_no_peer (test_cases.TestInherits" in output
    run = suite.run()
    assert run.count() == {"PASSED": 5}, run.text


@pytest.mark.parametrize("arguments", [("discover",), ("test_cases.TestMethods.test_unmarked",)])
def test_unmarked_test_cases_run(suite: Suite, arguments: tuple[str, ...]) -> None:
    text = _CASES.replace('    @pytest.mark.distributed(2, kind="cpu")\n', "").replace("@pytest.mark.devices(1)", "")
    suite.write("test_cases.py", text.replace("assert ", "'' and "))
    command = [sys.executable, "-m", "unittest", *arguments]
    completed = subprocess.run(command, cwd=suite.path, capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr.splitlines()[-1]) == (0, "OK")
