"""Tests of plugins that rerun failed tests (pytest-rerunfailures, flaky, pytest-retry): all ranks run them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.other_plugins.conftest import Pair
    from tests.run import Run

_SUITE = """
    import os
    from pathlib import Path

    import pytest

    RANK = os.environ.get("RANK", "1")
    two = pytest.mark.distributed(2, device="cpu")
    once_more = %s


    def times(name):
        path = Path(f"{name}.{RANK}")
        with path.open("a") as file:  # Two workers may count at the same time.
            file.write("x")
        return len(path.read_text())


    @pytest.fixture
    def counted():
        times("setup")
        yield
        times("teardown")


    @pytest.fixture
    def breaks_first():
        assert times("breaks_first") > 1 or RANK != "1"


    @two
    @once_more
    def test_once(counted):
        assert times("once") > 1 or RANK != "1", "the first time"


    @two
    @once_more
    def test_always(counted):
        times("always")
        raise ValueError("every time")


    @two
    @once_more
    def test_passes(counted):
        times("passes")


    @two
    @once_more
    def test_skips():
        times("skips")
        pytest.skip("not today")


    @two
    @once_more
    @pytest.mark.xfail(strict=True)
    def test_expected():
        times("expected")
        assert RANK != "1"


    @two
    def test_not_flaky():
        times("not_flaky")
        assert RANK != "1"


    @two
    @once_more
    def test_setup(breaks_first):
        times("after_setup")


    @once_more
    def test_unmarked():
        assert times("unmarked") > 1


    @two
    def test_last():
        times("last")
    """


def _assert_equal_counts(pair: Pair, *names: str) -> None:
    """Assert that the plain process and rank 1 have counted equally many calls of each of `names`."""
    for name in names:
        assert pair.marked.read(f"{name}.1") == pair.plain.read(f"{name}.1"), name


_COUNTED = ("once", "always", "passes", "skips", "expected", "not_flaky", "after_setup", "setup", "teardown", "last")


def _run_with_and_without_workers(pair: Pair, *args: str) -> tuple[Run, list[Run]]:
    """Run the plain suite, and the marked suite without and with xdist; fail unless results and counts are equal.

    Return the session of the plain suite and those of the marked suite.
    """
    plain = pair.plain.run(*args)
    assert plain.results
    sessions = []
    for workers in ((), ("-n1",)):
        for file in pair.marked.path.glob("*.[01]"):
            file.unlink()
        sessions.append(pair.run_marked(plain, *args, *workers))
        _assert_equal_counts(pair, *_COUNTED)
    return plain, sessions


@needs("pytest_rerunfailures")
def test_rerunfailures_reruns_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    pair.plugin("pytest_rerunfailures")
    pair.write("test_flaky.py", _SUITE % "pytest.mark.flaky(reruns=1)")
    _, sessions = _run_with_and_without_workers(pair, "-rR")
    for marked in sessions:
        assert marked.count() == {"RERUN": 4, "PASSED": 5, "FAILED": 2, "SKIPPED": 1, "XFAIL": 1}


@needs("flaky")
def test_flaky_reruns_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    pair.plugin("flaky.flaky_pytest_plugin")
    pair.write("test_flaky.py", _SUITE % "pytest.mark.flaky(max_runs=2)")
    plain, sessions = _run_with_and_without_workers(pair)
    for run in (plain, *sessions):
        assert "test_once failed (1 runs remaining out of 2)" in run.text


@needs("flaky")
def test_flaky_reruns_marked_tests_until_min_passes(pair: Pair) -> None:
    pair.plugin("flaky.flaky_pytest_plugin")
    pair.write("test_flaky.py", _SUITE % "pytest.mark.flaky(max_runs=3, min_passes=2)")
    pair.run_both()
    assert pair.plain.read("passes.1") == ["xx"]
    _assert_equal_counts(pair, *_COUNTED)


@needs("pytest_retry")
def test_pytest_retry_reruns_marked_tests_like_unmarked_ones(pair: Pair) -> None:
    pair.plugin("pytest_retry.retry_plugin")
    pair.write("test_flaky.py", _SUITE % "pytest.mark.flaky(retries=1)")
    plain, sessions = _run_with_and_without_workers(pair)
    for run in (plain, *sessions):
        assert "test_once passed on attempt 2!" in run.text
    for marked in sessions:
        assert "ranks 0-1: failed" in marked.failure("test_always")


_DYING = """
    import os
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, device="cpu")


    class Flaky(Exception):
        pass


    def times(name):
        path = Path(f"{name}.{os.environ['RANK']}")
        path.write_text(f"{path.read_text()}x" if path.exists() else "x")
        return len(path.read_text())


    @pytest.fixture
    def counted():
        times("setup")


    %s
    def test_once(rank, counted):
        if times("once") == 1 and rank == 1:
            raise Flaky("the first time")


    %s
    def test_always():
        raise ValueError("every time")


    %s
    def test_dies(rank):
        if times("dies") == 1 and rank == 1:
            os._exit(3)


    %s
    def test_stable():
        pass
    """


@needs("pytest_rerunfailures")
def test_rerunfailures_reruns_all_ranks_if_one_fails_or_dies(suite: Suite) -> None:
    suite.plugin("pytest_rerunfailures")
    suite.write("test_flaky.py", _DYING % ("", "", "", ""))
    run = suite.run("--reruns=1")
    assert {name.partition("::")[2]: words for name, words in run.results.items()} == {
        "test_once": ["RERUN", "PASSED"],
        "test_always": ["RERUN", "FAILED"],
        "test_dies": ["RERUN", "PASSED"],
        "test_stable": ["PASSED"],
    }
    assert "1 failed, 3 passed, 3 rerun" in run.text
    for rank in (0, 1):
        assert suite.read(f"setup.{rank}") == ["xx"]  # The whole test is rerun, and exactly once.


@needs("pytest_rerunfailures")
def test_only_rerun_matches_errors_of_ranks(suite: Suite) -> None:
    suite.plugin("pytest_rerunfailures")
    flaky = "@pytest.mark.flaky(reruns=2, only_rerun='Flaky')"
    suite.write("test_flaky.py", _DYING % (flaky, flaky, flaky, ""))
    run = suite.run("-n1")
    assert {name.partition("::")[2]: words for name, words in run.results.items()} == {
        "test_once": ["RERUN", "PASSED"],
        "test_always": ["FAILED"],
        "test_dies": ["FAILED"],
        "test_stable": ["PASSED"],
    }
    for name in ("once", "dies"):
        (suite.path / f"{name}.1").unlink()
    (suite.path / "test_flaky.py").write_text((suite.path / "test_flaky.py").read_text().replace(flaky, ""))
    run = suite.run("--reruns=1", "--only-rerun=ValueError: every", "-k", "once or always")
    assert run.result("test_once") == "FAILED"
    assert run.result("test_always") == "RERUN FAILED"
