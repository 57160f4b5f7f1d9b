"""Tests of plugins that decide whether, how often, how long and where a test runs: the driver does so for all ranks."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite
from tests.features.plugins.conftest import Pair, needs

_HEAD = """
    import os
    import threading
    from pathlib import Path

    import pytest

    RANK = os.environ.get("RANK", "1")
    LAST = RANK == "1"
    two = pytest.mark.distributed(2, kind="cpu", init=False)
    three = pytest.mark.distributed(3, kind="cpu", init=False)

    def times(name):
        path = Path(f"{name}.{RANK}")
        with path.open("a") as file:  # Two workers may count at the same time.
            file.write("x")
        return len(path.read_text())
    """
_FLAKY = """
    @pytest.fixture
    def counted():
        times("setup")
        yield
        times("teardown")

    @two
    @once_more
    def test_once(counted): assert times("once") > 1 or RANK != "1", "the first time"

    @two
    @once_more
    def test_always(counted):
        times("always")
        raise ValueError("every time")

    @two
    @once_more
    def test_passes(counted): times("passes")

    @two
    @once_more
    @pytest.mark.xfail(strict=True)
    def test_expected():
        times("expected")
        assert RANK != "1"

    @once_more
    def test_unmarked(): assert times("unmarked") > 1
    """
_COUNTED = ("once", "always", "passes", "expected", "setup", "teardown")


@pytest.mark.parametrize(
    ("plugin", "mark", "shown", "workers"),
    [
        pytest.param("pytest_rerunfailures", "reruns=1", "", (), marks=needs("pytest_rerunfailures")),
        pytest.param(
            *("flaky.flaky_pytest_plugin", "max_runs=2", "test_once failed (1 runs remaining out of 2)", ("-n1",)),
            marks=needs("flaky"),
        ),
        pytest.param(
            *("pytest_retry.retry_plugin", "retries=1", "test_once passed on attempt 2!", ("-n1",)),
            marks=needs("pytest_retry"),
        ),
    ],
)
def test_marked_tests_are_rerun_like_unmarked_ones(
    pair: Pair, plugin: str, mark: str, shown: str, workers: tuple[str, ...]
) -> None:
    pair.without_torch()
    pair.plugin(plugin)
    pair.write("test_flaky.py", f"{_HEAD}\n    once_more = pytest.mark.flaky({mark})\n{_FLAKY}")
    plain = pair.plain.run("-rR")
    marked = pair.run_marked(plain, "-rR", *workers)
    for name in _COUNTED:
        assert pair.marked.read(f"{name}.1") == pair.plain.read(f"{name}.1"), name
    assert shown in plain.text
    assert shown in marked.text
    assert "ranks 0-1: failed" in marked.failure("test_always")


_DYING = """
    pytestmark = two

    @pytest.fixture
    def counted(): times("setup")

    def test_dies_once(rank, counted):
        if times("dies_once") == 1 and rank == 1:
            os._exit(3)

    def test_raises(): raise ValueError("every time")

    @pytest.mark.flaky(reruns=1, only_rerun="ValueError")
    def test_raises_once(rank):
        if times("raises_once") == 1 and rank == 1:
            raise ValueError("the first time")
    """


@needs("pytest_rerunfailures")
def test_rerunfailures_reruns_all_ranks_if_one_dies_or_fails_with_an_error_that_it_matches(suite: Suite) -> None:
    suite.without_torch()
    suite.plugin("pytest_rerunfailures")
    suite.write("test_flaky.py", _HEAD + _DYING)
    run = suite.run("--reruns=1", "--only-rerun=RankDied", "-n1")
    run.expect({"test_dies_once": "RERUN PASSED", "test_raises_once": "RERUN PASSED", "test_raises": "FAILED"})
    assert [suite.read(f"setup.{rank}") for rank in (0, 1)] == [["xx"], ["xx"]]  # Rerun as a whole, and exactly once.


_SLOW = """
    pytestmark = two

    def test_before(): pass

    @pytest.mark.timeout(4)
    def test_hangs(rank):
        if rank == 1:
            threading.Event().wait()  # In this line.

    @pytest.mark.timeout(30)
    def test_in_time(): pass

    @pytest.mark.timeout(4, method="thread")
    def test_hangs_and_the_session_goes_on(rank):
        if rank == 0:
            threading.Event().wait()
    """


@needs("pytest_timeout")
def test_driver_enforces_timeouts_of_pytest_timeout(suite: Suite) -> None:
    suite.without_torch()
    suite.plugin("pytest_timeout")
    # On a busy machine, too, 4 seconds are enough for the setup, and for the rank that does not hang.
    path = suite.write("test_slow.py", _HEAD + _SLOW)
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "In this line" in text)
    run = suite.run()
    assert run.count() == {"PASSED": 2, "FAILED": 2}
    assert f"timed out after 4 s: rank 1 is at test_slow.py:{line}" in run.failure("test_hangs")
    text = "timed out after 4 s: rank 0 is at test_slow.py:"
    assert text in run.failure("test_hangs_and_the_session_goes_on")


_DEPENDENT = """
    depends = pytest.mark.dependency

    @depends()
    def test_unmarked(): pass

    @two
    @depends(depends=["test_unmarked"])
    def test_on_unmarked(): times("on_unmarked")

    @three
    @depends(depends=["test_on_unmarked"])
    def test_on_another_world(): times("on_another_world")

    @two
    @depends()
    def test_fails(): assert not LAST

    @two
    @depends(depends=["test_on_unmarked", "test_fails"])
    def test_on_a_failure(): times("on_a_failure")

    @depends(depends=["test_on_a_failure"])
    def test_unmarked_on_a_skip(): times("unmarked_on_a_skip")

    @depends(depends=["test_on_another_world"])
    def test_unmarked_on_marked(): pass
    """


@needs("pytest_dependency")
def test_tests_are_skipped_if_tests_that_they_depend_on_fail(pair: Pair) -> None:
    pair.without_torch()
    pair.plugin("pytest_dependency")
    pair.write("test_depends.py", _HEAD + _DEPENDENT)
    plain = pair.plain.run("-rs")
    marked = pair.run_marked(plain, "-rs", "-n1", "--dist=loadfile")  # One worker runs all tests of a file.
    assert marked.count() == {"PASSED": 4, "FAILED": 1, "SKIPPED": 2}
    assert "test_on_a_failure depends on test_fails" in marked.text
    ran = {path.stem for path in pair.marked.path.glob("*.[012]")}
    assert ran == {"on_another_world", "on_unmarked"}  # Ranks run no test that the driver skips.
