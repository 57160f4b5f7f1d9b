"""Tests of releases of other plugins that lack the names which are used: one warning, or a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair

_CONFTEST = """
    import pkgutil

    import pytest


    class Renamed:
        \"\"\"Hides a name of a plugin until tests run. The plugin itself would have it under another name.\"\"\"

        def pytest_configure(self, config):
            self.owner = pkgutil.resolve_name("{owner}")
            self.hidden = vars(self.owner)["{name}"]
            delattr(self.owner, "{name}")

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self):
            setattr(self.owner, "{name}", self.hidden)


    @pytest.hookimpl(trylast=True)
    def pytest_configure(config):
        config.pluginmanager.register(Renamed())
    """
_BENCHMARK = """
    import pytest


    @pytest.mark.distributed(2, kind="cpu")
    def test_in_ranks(benchmark, rank):
        import torch.distributed as dist

        def measured():
            with open(f"calls{rank}", "a") as file:
                file.write("call\\n")
            dist.barrier()

        benchmark(measured)
    """
_SNAPSHOT = """
    import pytest


    @pytest.mark.distributed(2, kind="cpu")
    def test_in_ranks(snapshot):
        pass
    """


@needs("pytest_bdd", "pytest_benchmark")
@pytest.mark.parametrize(
    ("plugin", "owner", "name", "missing"),
    [
        ("pytest_bdd.plugin", "pytest_bdd.reporting", "ReportContext", "the steps of pytest-bdd"),
        (
            "pytest_benchmark.plugin",
            "pytest_benchmark.fixture:BenchmarkFixture",
            "_calibrate_timer",
            "the statistics, and their functions run once",
        ),
    ],
)
def test_what_marked_tests_lack_is_said_once(pair: Pair, plugin: str, owner: str, name: str, missing: str) -> None:
    """The suite makes warnings errors, which must not end the session."""
    pair.plugin("pytest_bdd.plugin", "pytest_benchmark.plugin")
    pair.marked.write("conftest.py", _CONFTEST.format(owner=owner, name=name))
    pair.marked.write("test_it.py", _BENCHMARK)
    run = pair.marked.run("--benchmark-max-time=0.05")
    assert run.count() == {"PASSED": 1}
    assert run.text.count(f"pytest-accel does not know this release of {plugin}") == 1
    assert f"marked tests lack {missing}" in run.text
    if "benchmark" in plugin:  # Ranks that chose the number of rounds would wait for each other in the collective.
        assert [pair.marked.read(f"calls{rank}") for rank in (0, 1)] == [["call"], ["call"]]


@needs("syrupy")
def test_a_release_with_which_ranks_would_write_snapshots_is_refused(pair: Pair) -> None:
    pair.plugin("syrupy")
    pair.marked.write("conftest.py", _CONFTEST.format(owner="syrupy.session:SnapshotSession", name="ran_item"))
    pair.marked.write("test_it.py", _SNAPSHOT)
    run = pair.marked.run()
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    text = run.text + run.errors
    assert "pytest-accel does not know this release of syrupy (" in text
    assert "snapshots of marked tests would be written or removed by each rank; switch it off with -p no:syrupy" in text
