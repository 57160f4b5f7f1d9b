"""Tests of releases of other plugins that lack the names which are used: one warning, or the failure of a fixture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair

_CONFTEST = """
    import pkgutil

    import pytest

    class Renamed:
        "Hides names of plugins until tests run. The plugins themselves would have them under other names."

        def pytest_configure(self, config):
            names = "{names}".split()
            self.owners = [pkgutil.resolve_name(name.rpartition(".")[0]) for name in names]
            self.names = [name.rpartition(".")[2] for name in names]
            self.hidden = [vars(owner)[name] for owner, name in zip(self.owners, self.names)]
            for owner, name in zip(self.owners, self.names):
                delattr(owner, name)

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self):
            for owner, name, value in zip(self.owners, self.names, self.hidden):
                setattr(owner, name, value)

    @pytest.hookimpl(trylast=True)
    def pytest_configure(config): config.pluginmanager.register(Renamed())
    """
_TESTS = """
    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu")

    def test_benchmark(benchmark, rank):
        import torch.distributed as dist

        def measured():
            with open(f"calls{rank}", "a") as file:
                file.write("call\\n")
            dist.barrier()

        benchmark(measured)

    def test_snapshot(snapshot): assert 1 == snapshot

    def test_passes(): pass
    """


@needs("syrupy", "pytest_benchmark")
def test_an_unknown_release_is_one_warning_and_fails_what_would_do_damage(pair: Pair) -> None:
    """The suite makes warnings errors, which must not end the session."""
    suite = pair.marked
    suite.plugin("syrupy")
    suite.plugin("pytest_benchmark.plugin")
    names = "pytest_benchmark.fixture:BenchmarkFixture._calibrate_timer syrupy.session:SnapshotSession.recall_snapshot"
    suite.write("conftest.py", _CONFTEST.format(names=names))
    suite.write("test_it.py", _TESTS)
    run = suite.run("--benchmark-max-time=0.05")
    assert run.outcomes() == {"test_benchmark": "PASSED", "test_snapshot": "ERROR", "test_passes": "PASSED"}
    for plugin, missing in (("pytest_benchmark.plugin", "statistics, and run once"), ("syrupy", "new snapshots")):
        assert run.text.count(f"PytestWarning: pytest-accel does not know this release of {plugin}") == 1
        assert f"marked tests lack {missing}" in run.text
    # Ranks that chose the number of rounds would wait for each other in the collective.
    assert [suite.read(f"calls{rank}") for rank in (0, 1)] == [["call"], ["call"]]
    assert "all ranks would write the same files: switch it off with -p no:syrupy" in run.failure("test_snapshot")


@needs("syrupy")
def test_an_update_that_would_remove_snapshots_of_marked_tests_is_refused(pair: Pair) -> None:
    suite = pair.marked
    suite.plugin("syrupy")
    suite.write("conftest.py", _CONFTEST.format(names="syrupy.session:SnapshotSession.ran_item"))
    suite.write("test_it.py", _TESTS)
    run = suite.run("--snapshot-update")
    assert "syrupy, which would remove snapshots of marked tests: leave out --snapshot-update" in run.text + run.errors
