"""Tests of plugins that select, order or partition the tests of a session."""

from __future__ import annotations

import json

import pytest

from tests.features.conftest import Suite
from tests.features.plugins.conftest import Pair, needs

_CONFTEST = """
    import os

    import pytest

    def pytest_configure(config):
        for name in ("order", "slow"):
            config.addinivalue_line("markers", f"{name}: a mark of one of the plugins")

    @pytest.fixture(autouse=True)
    def noted(request):
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["NOTES"], "a") as notes:
                notes.write(f"{request.node.nodeid}\\n")
    """
_TESTS = """
    import pytest

    in_ranks = pytest.mark.distributed(2, kind="cpu", init=False)

    @pytest.mark.order(-1)
    def test_last(): pass

    @in_ranks
    @pytest.mark.order(after="test_alone")
    @pytest.mark.parametrize("n", [1, 2])
    def test_many(n): pass

    def test_alone(): pass

    @in_ranks
    @pytest.mark.slow
    def test_slow(): raise ValueError("slow")

    @in_ranks
    class TestGroup:
        @pytest.mark.order("second")
        def test_second(self): pass

        def test_fails(self): assert 0

        @pytest.mark.order(0)
        def test_first(self): pass
    """
_MORE_TESTS = """
    import pytest

    @pytest.mark.distributed(2, kind="cpu", init=False)
    @pytest.mark.order(before="test_a.py::test_many", index=1)
    def test_others(): pass
    """


def _run_in_order(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, dict[str, str], list[str]]:
    """Run a session; return its exit status, the outcomes of its tests, and their order on rank 0."""
    monkeypatch.setenv("NOTES", str(suite.path / "notes"))
    (suite.path / "notes").unlink(missing_ok=True)
    run = suite.run(*options)
    return run.ret, run.outcomes(), suite.read("notes")


def _plugin_params(names: str, options: str) -> object:
    """Return a parameter set of options and of plugins, each given by module and name for ``-p`` (``MODULE:NAME``)."""
    modules, registered = zip(*(name.split(":") for name in names.split()), strict=True)
    return pytest.param(registered, options.split(), marks=needs(*modules), id="+".join(registered))


_DURATIONS = {
    "test_a.py::test_alone": 1.0,
    "test_a.py::test_many[1]": 2.0,
    "test_a.py::TestGroup::test_first": 9.0,
    "test_b.py::test_others": 5.0,
}


_SELECTIONS = [
    _plugin_params("pytest_order:pytest_order.plugin", ""),
    _plugin_params("pytest_randomly:randomly", "--randomly-seed=4"),
    _plugin_params(
        "random_order:random_order pytest_test_groups:test-groups",
        "--random-order --random-order-seed=4 --test-group-count=6 --test-group=5",
    ),
    _plugin_params("pytest_reverse:reverse pytest_shard:pytest-shard", "--reverse --num-shards=2 --shard-id=1"),
    _plugin_params("pytest_split:pytest-split", "--splits=2 --group=2"),
]


@pytest.mark.parametrize(("names", "options"), _SELECTIONS)
def test_marked_and_unmarked_tests_run_in_the_same_order(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], options: list[str]
) -> None:
    pair.without_torch()
    pair.plugin(*names)
    pair.write("conftest.py", _CONFTEST)
    pair.write("test_a.py", _TESTS)
    pair.write("test_b.py", _MORE_TESTS)
    pair.write(".test_durations", json.dumps(_DURATIONS))
    plain, marked = (_run_in_order(one, monkeypatch, *options) for one in (pair.plain, pair.marked))
    assert marked == plain
    assert marked[2]
    status, outcomes, order = _run_in_order(pair.marked, monkeypatch, "-n1", *options)
    # Under xdist the scheduler chooses the order.
    assert (status, outcomes, sorted(order)) == (plain[0], plain[1], sorted(plain[2]))


@needs("pytest_split", "pytest_shard", "pytest_test_groups")
def test_accel_shard_with_another_partition_is_refused(suite: Suite) -> None:
    for plugin in ("pytest-split", "pytest-shard", "test-groups"):
        suite.plugin(plugin)
    suite.write("test_it.py", "def test_it(): pass\n")
    for options in ("--splits=2 --group=1", "--num-shards=3 --shard-id=0", "--test-group-count=2 --test-group=1"):
        run = suite.run("--accel-shard=1/2", *options.split())
        refused = options.partition(" ")[0].replace("=", " ")
        assert f"ERROR: --accel-shard 1/2 cannot be used with {refused}: each runs a part of the tests" in run.errors
