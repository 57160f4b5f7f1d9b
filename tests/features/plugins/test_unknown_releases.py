"""Tests of releases of other plugins that lack the names which are used: one warning, or the failure of a fixture."""

from __future__ import annotations

from tests.features.plugins.conftest import Pair, needs

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

    def test_passes(): pass
    """


@needs("syrupy", "pytest_benchmark", "pytest_snapshot")
def test_an_unknown_release_is_one_warning_or_fails_if_all_ranks_would_write(pair: Pair) -> None:
    """The suite makes warnings errors, which must not end the session."""
    suite = pair.marked
    suite.plugin("pytest_benchmark.plugin")
    names = "pytest_benchmark.fixture:BenchmarkFixture._calibrate_timer"
    suite.write("conftest.py", _CONFTEST.format(names=names))
    suite.write("test_it.py", _TESTS)
    run = suite.run("--benchmark-max-time=0.05")
    assert run.outcomes() == {"test_benchmark": "PASSED", "test_passes": "PASSED"}
    assert run.text.count("PytestWarning: pytest-accel does not know this release of pytest_benchmark.plugin") == 1
    assert "marked tests may lack its data, or write its files on each rank" in run.text
    # Ranks that chose the number of rounds would wait for each other in the collective.
    assert [suite.read(f"calls{rank}") for rank in (0, 1)] == [["call"], ["call"]]

    suite.write(
        "test_it.py", "import pytest\n@pytest.mark.distributed(2)\ndef test_it(snapshot): assert 1 == snapshot\n"
    )
    used_by_ranks, used_by_driver = (
        "pytest_snapshot.plugin:Snapshot.assert_match_dir",
        "syrupy.session:SnapshotSession.ran_item",
    )
    for name, used in (("snapshot", used_by_ranks), ("syrupy", used_by_driver)):
        suite.write("conftest.py", _CONFTEST.format(names=used))
        run = suite.run("-p", name, "--snapshot-update")
        assert f"with which ranks would write the same files: switch it off with -p no:{name}" in run.text + run.errors
        assert "passed" not in run.text
        assert not (suite.path / "__snapshots__").exists()
