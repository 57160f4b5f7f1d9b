"""Tests of pytest's own options in sessions with marked tests: ``-x``, ``--lf``, ``-k``, and others."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_FIVE_TESTS = """
    import os
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu", init=False)


    def test_one():
        pass


    def test_two(rank):
        assert Path("mended").exists() or rank == 0


    def test_three():
        print("three")


    @pytest.mark.mine
    def test_four():
        assert Path("mended").exists()


    def test_five():
        Path(f"five{os.environ['RANK']}").touch()
    """


def _write_five_tests(suite: Suite) -> None:
    suite.ini("markers = mine: a mark of the suite")
    suite.write("test_five.py", _FIVE_TESTS)


@pytest.mark.long
def test_x_and_maxfail_stop_the_session(suite: Suite) -> None:
    _write_five_tests(suite)
    suite.write("test_six.py", "def test_unmarked():\n    pass\n")
    run = suite.run("-x", "--tb=short")
    assert run.count() == {"PASSED": 1, "FAILED": 1}
    assert "stopping after 1 failures" in run.text
    assert re.search(r"^test_five.py:15: in test_two\n", run.text, re.MULTILINE)

    run = suite.run("--maxfail=2", "--tb=line")
    assert run.count() == {"PASSED": 2, "FAILED": 2}
    assert "stopping after 2 failures" in run.text
    assert re.search(r"test_five.py:15: rank 1: AssertionError: assert ", run.text)
    assert not (suite.path / "five0").exists()


@pytest.mark.long
def test_lf_and_ff_run_failed_tests_again(suite: Suite) -> None:
    _write_five_tests(suite)
    assert suite.run("--tb=native").count() == {"PASSED": 3, "FAILED": 2}
    (suite.path / "five1").unlink()

    run = suite.run("--lf", "--tb=native")
    assert run.count() == {"FAILED": 2}
    assert 'test_five.py", line 15, in test_two' in run.text
    assert len(re.findall(r"^(?:rank 1|ranks 0-1) of 2 on cpu\n\nTraceback", run.text, re.MULTILINE)) == 2

    (suite.path / "mended").touch()
    run = suite.run("--ff")
    assert list(run.results) == [f"test_five.py::test_{name}" for name in ("two", "four", "one", "three", "five")]
    assert run.count() == {"PASSED": 5}
    assert (suite.path / "five1").exists()


def test_options_and_arguments_select_marked_tests(suite: Suite) -> None:
    _write_five_tests(suite)
    (suite.path / "mended").touch()
    run = suite.run("-k", "two or mine", "-m", "distributed", "--strict-markers", "-q", "-s", "--tb=no")
    assert "2 passed, 3 deselected" in run.text

    run = suite.run("test_five.py::test_three", "-s", "-rP")
    assert "1 passed" in run.text
    assert "\n[rank 0] three\n" in run.text
    assert "\n[rank 1] three\n" in run.text
    assert "Captured stdout" not in run.text

    run = suite.run("-q", "-k", "no_such_test", quiet=True)
    assert run.ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.long
def test_options_that_only_show_tests_start_no_process(suite: Suite) -> None:
    """Not even the fork server is started: it would import the module `told`."""
    _write_five_tests(suite)
    suite.write("told.py", "import os\nfrom pathlib import Path\nPath(f'imported{os.getpid()}').touch()\n")
    suite.ini("accel_preload = told")
    run = suite.run("--collect-only", "-q", quiet=True)
    assert run.ret == 0
    assert [line for line in run.text.splitlines() if "::" in line] == [
        f"test_five.py::test_{name}" for name in ("one", "two", "three", "four", "five")
    ]
    run = suite.run("--setup-plan")
    assert run.ret == 0
    assert "\nSETUP    S rank\n        test_five.py::test_two (fixtures used: rank, request)\n" in run.text
    assert not list(suite.path.glob("five*"))

    run = suite.run("--markers", quiet=True)
    assert run.ret == 0
    assert "@pytest.mark.distributed(world_size=2" in run.text
    run = suite.run("--fixtures", quiet=True)
    assert "device_mesh" in run.text
    assert run.ret == 0
    assert not list(suite.path.glob("imported*"))
