"""Tests of plugins that rerun failed tests (pytest-rerunfailures, flaky, pytest-retry): all ranks run them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.conftest import Suite
    from tests.features.plugins.conftest import Pair

_SUITE = """
    import os
    from pathlib import Path

    import pytest

    RANK = os.environ.get("RANK", "1")
    two = pytest.mark.distributed(2, kind="cpu")
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
    @pytest.mark.xfail(strict=True)
    def test_expected():
        times("expected")
        assert RANK != "1"


    @two
    @once_more
    def test_setup(breaks_first):
        times("after_setup")


    @once_more
    def test_unmarked():
        assert times("unmarked") > 1


    """


_COUNTED = ("once", "always", "passes", "skips", "expected", "after_setup", "setup", "teardown")


@pytest.mark.parametrize(
    ("plugin", "mark", "shown", "workers"),
    [
        pytest.param("pytest_rerunfailures", "reruns=1", "", (), marks=needs("pytest_rerunfailures")),
        pytest.param("pytest_rerunfailures", "reruns=1", "", ("-n1",), marks=needs("pytest_rerunfailures")),
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
    pair.plugin(plugin)
    pair.write("test_flaky.py", _SUITE % f"pytest.mark.flaky({mark})")
    plain = pair.plain.run("-rR")
    marked = pair.run_marked(plain, "-rR", *workers)
    for name in _COUNTED:
        assert pair.marked.read(f"{name}.1") == pair.plain.read(f"{name}.1"), name
    assert shown in plain.text
    assert shown in marked.text
    assert "ranks 0-1: failed" in marked.failure("test_always")


_DYING = """
    import os
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu")


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
