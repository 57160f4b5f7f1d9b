"""Tests of plugins that run each test in a fork of the pytest process (pytest-forked, pytest-isolate)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
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


@needs("pytest_forked")
def test_marked_tests_are_not_forked(pair: Pair) -> None:
    pair.plugin("pytest_forked")
    pair.write("test_forked.py", _SUITE % (("",) * 6))
    plain, marked = pair.plain.run("--forked"), pair.marked.run("--forked")
    # pytest-forked 1.7.5 fails all tests under pytest 9.2.
    for name in ("test_unmarked", "test_unmarked_finds_no_state"):
        assert marked.result(name) == plain.result(name)
    # A marked test has its own processes without forking, too.
    assert marked.result("test_leaves_state") == marked.result("test_finds_no_state") == "PASSED"
    assert marked.result("test_fails") == marked.result("test_dies") == "FAILED"
    assert "rank 1 exited with status 3" in marked.failure("test_dies")

    pair.marked.write("test_forked.py", _SUITE % (("@pytest.mark.forked",) * 6))
    run = pair.marked.run("-k", "state and not unmarked")
    assert run.outcomes() == {"test_leaves_state": "PASSED", "test_finds_no_state": "PASSED"}


@needs("pytest_isolate")
def test_pytest_isolate_is_refused_for_marked_tests(suite: Suite) -> None:
    suite.plugin("pytest_isolate.plugin")
    # Sessions of tests that a rule marks are refused before they start a fork server.
    suite.ini("accel_rules = test_plain.py: distributed(2)\n    test_isolated.py: distributed(2)")
    suite.write("test_plain.py", "def test_plain():\n    pass\n")
    suite.write(
        "test_isolated.py", "import pytest\n\n@pytest.mark.isolate(timeout=30)\ndef test_isolated():\n    pass\n"
    )
    for options in (("--isolate", "test_plain.py"), ("-n2", "test_isolated.py")):
        run = suite.run("-W", "default", *options)
        assert run.ret == pytest.ExitCode.USAGE_ERROR
        assert "pytest-isolate runs a test in a fork of the pytest process" in run.text + run.errors
    suite.write("test_forked.py", _SUITE % ("", "@pytest.mark.isolate(timeout=30)", "", "", "", ""))
    run = suite.run("-W", "default", "--no-isolate", "-k", "fails or dies or leaves", "test_forked.py")
    assert run.count() == {"PASSED": 1, "FAILED": 2}
