"""Tests of plugins that run each test several times (pytest-repeat, pytest-flakefinder, pytest-run-parallel)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_SUITE = """
    import os
    import unittest

    import pytest

    RANK = os.environ.get("RANK", "1")
    two = pytest.mark.distributed(2, device="cpu")


    def note(name):
        with open(f"{name}.{RANK}", "a") as file:
            print("x", file=file)


    @two
    def test_passes():
        note("passes")
        if "RANK" in os.environ:
            import torch.distributed as dist

            dist.barrier()


    @two
    @pytest.mark.parametrize("how", ["a", "b"])
    def test_fails(how):
        note("fails")
        assert how == "a" or RANK != "1"


    %s


    def test_unmarked():
        pass
    """
_UNITTEST = """
    @two
    class TestOfUnittest(unittest.TestCase):
        def test_case(self):
            note("case")
"""


def _assert_equal_counts(pair: Pair, *names: str) -> None:
    """Assert that the plain process and both ranks have noted each of `names` equally often."""
    for name in names:
        assert pair.plain.read(f"{name}.1") == pair.marked.read(f"{name}.1") == pair.marked.read(f"{name}.0") != [], (
            name
        )


@needs("pytest_repeat")
def test_repeated_tests_run_on_all_ranks(pair: Pair) -> None:
    pair.plugin("pytest_repeat")
    pair.write("test_repeated.py", _SUITE % "")
    _, marked = pair.run_both("--count=2", "--repeat-scope=session")
    assert marked.count() == {"PASSED": 6, "FAILED": 2}
    assert next(iter(marked.results)).endswith("test_passes[1-2]")
    _assert_equal_counts(pair, "passes", "fails")


@needs("pytest_flakefinder")
def test_flakefinder_repeats_tests_on_all_ranks(pair: Pair) -> None:
    pair.plugin("pytest_flakefinder")
    pair.write("test_flaky.py", _SUITE % _UNITTEST)
    _, marked = pair.run_both("--flake-finder", "--flake-runs=2", "--flake-max-minutes=10")
    assert marked.count() == {"PASSED": 8, "FAILED": 2}
    _assert_equal_counts(pair, "passes", "fails", "case")


@needs("pytest_run_parallel")
def test_a_marked_test_runs_in_one_thread_of_each_rank(pair: Pair) -> None:
    pair.plugin("pytest_run_parallel.plugin")
    pair.write("test_threads.py", _SUITE % "")
    run = pair.marked.run("--parallel-threads=2", "--iterations=3")
    assert run.ret == 1
    assert "test_passes PASSED [thread-unsafe]: runs in ranks" in run.text
    assert "test_unmarked PARALLEL PASSED" in run.text
    assert "test_fails[b]: runs in ranks" not in run.text
    assert "rank 1: failed" in run.failure("test_fails[b]")
    for rank in (0, 1):
        assert pair.marked.read(f"passes.{rank}") == ["x"] * 3
