"""Tests of pytest-forked, which runs each test in a fork of the pytest process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair

_SUITE = """
    import os

    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, kind="cpu")


    @two
    def test_leaves_state():
        pytest.left_by_a_test = True


    @two
    def test_finds_no_state():
        import torch.distributed as dist

        assert not hasattr(pytest, "left_by_a_test")
        if "RANK" in os.environ:
            dist.barrier()


    @two
    def test_fails():
        assert not LAST


    @two
    def test_dies():
        if LAST:
            os._exit(3)


    def test_unmarked():
        pytest.left_by_a_test = True


    def test_unmarked_finds_no_state():
        assert not hasattr(pytest, "left_by_a_test")
    """


@needs("pytest_forked")
def test_marked_tests_are_not_forked(pair: Pair) -> None:
    pair.plugin("pytest_forked")
    pair.write("test_forked.py", _SUITE)
    plain, marked = pair.plain.run("--forked"), pair.marked.run("--forked")
    for name in (
        "test_unmarked",
        "test_unmarked_finds_no_state",
    ):  # pytest-forked 1.7.5 fails all tests under pytest 9.2.
        assert marked.result(name) == plain.result(name)
    # A marked test has its own processes without forking, too.
    assert marked.result("test_leaves_state") == marked.result("test_finds_no_state") == "PASSED"
    assert marked.result("test_fails") == marked.result("test_dies") == "FAILED"
    assert "rank 1 exited with status 3" in marked.failure("test_dies")
