"""Tests of plugins that run each test in a fork of the pytest process (pytest-forked, pytest-isolate)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_SUITE = """
    import os

    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, device="cpu")


    @two
    %s
    def test_leaves_state():
        pytest.left_by_a_test = True


    @two
    %s
    def test_finds_no_state():
        import torch.distributed as dist

        assert not hasattr(pytest, "left_by_a_test")
        if "RANK" in os.environ:
            dist.barrier()


    @two
    %s
    def test_fails():
        assert not LAST


    @two
    %s
    def test_dies():
        if LAST:
            os._exit(3)


    %s
    def test_unmarked():
        pytest.left_by_a_test = True


    %s
    def test_unmarked_finds_no_state():
        assert not hasattr(pytest, "left_by_a_test")
    """


@pytest.mark.parametrize("mark", ["", "@pytest.mark.forked"])
@needs("pytest_forked")
def test_marked_tests_are_not_forked(pair: Pair, mark: str) -> None:
    pair.plugin("pytest_forked")
    pair.write("test_forked.py", _SUITE % ((mark,) * 6))
    options = () if mark else ("--forked",)
    plain, marked = pair.plain.run(*options), pair.marked.run(*options)
    for name in (
        "test_unmarked",
        "test_unmarked_finds_no_state",
    ):  # pytest-forked 1.7.5 fails all tests under pytest 9.2.
        assert marked.result(name) == plain.result(name)
    # A marked test has its own processes without forking, too.
    assert marked.result("test_leaves_state") == marked.result("test_finds_no_state") == "PASSED"
    assert marked.result("test_fails") == marked.result("test_dies") == "FAILED"
    assert "rank 1 exited with status 3" in marked.failure("test_dies")


@needs("pytest_isolate")
def test_pytest_isolate_is_refused_for_marked_tests(pair: Pair) -> None:
    pair.plugin("pytest_isolate.plugin")
    pair.write("test_isolated.py", _SUITE % ("", "@pytest.mark.isolate(timeout=30)", "", "", "", ""))
    for options in (("--isolate",), ("-k", "finds", "-n1")):
        run = pair.marked.run("-W", "default", *options)
        assert run.ret == pytest.ExitCode.USAGE_ERROR
        assert "pytest-isolate runs a test in a fork of the pytest process" in run.text + run.errors
    run = pair.marked.run("-W", "default", "--no-isolate", "-k", "fails or dies or leaves")
    assert run.count() == {"PASSED": 1, "FAILED": 2}
