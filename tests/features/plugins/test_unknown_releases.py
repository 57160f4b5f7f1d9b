"""Tests of releases of other plugins that lack internals: they are refused only where they would do damage."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair
    from tests.run import Run

_CONFTEST = """
    import pkgutil

    import pytest


    class Renamed:
        \"\"\"Hides an internal of a plugin until tests run. The plugin itself would have it under another name.\"\"\"

        def pytest_configure(self, config):
            place = "{place}"
            self.owner = config.option if place == "config.option" else pkgutil.resolve_name(place)
            self.internal = vars(self.owner)["{name}"]
            delattr(self.owner, "{name}")

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self):
            setattr(self.owner, "{name}", self.internal)


    @pytest.hookimpl(trylast=True)
    def pytest_configure(config):
        config.pluginmanager.register(Renamed())
    """
_TESTS = """
    import pytest


    @pytest.mark.distributed(2, kind="cpu")
    def test_in_ranks(rank):
        assert rank < 2


    def test_unmarked():
        pass
    """


def _rows(*rows: tuple[list[str], str, str, list[str], str]) -> list[object]:
    """Return parameters: names of plugins to load, distribution, place and name of an internal, options, text."""
    return [
        pytest.param(
            modules,
            plugin,
            owner,
            options,
            text,
            id=" ".join((plugin, *(option.partition("=")[0] for option in options))),
            marks=needs(*(name.partition(".")[0] for name in modules)),
        )
        for modules, plugin, owner, options, text in rows
    ]


_BENCHMARK = ["pytest_benchmark.plugin"], "pytest-benchmark"
_FORKED = ["pytest_forked"], "pytest-forked", "pytest_forked:pytest_runtest_protocol"
_ORDER = ["pytest_order.plugin"], "pytest-order", "pytest_order.plugin:fail_after_cannot_order"
_SNAPSHOT = ["pytest_snapshot.plugin"], "pytest-snapshot", "pytest_snapshot.plugin:Snapshot._snapshot_path"
_SYRUPY = ["syrupy"], "syrupy", "syrupy.session:SnapshotSession.ran_item"


@pytest.mark.parametrize(
    ("modules", "plugin", "owner", "options", "missing"),
    _rows(
        (["pytest_bdd.plugin"], "pytest-bdd", "pytest_bdd.reporting:ReportContext", ["-n2"], "the steps of scenarios"),
        (*_BENCHMARK, "pytest_benchmark.fixture:BenchmarkFixture._save_cprofile", [], "the statistics"),
    ),
)
def test_what_an_unknown_release_lacks_is_said_once(
    pair: Pair, modules: list[str], plugin: str, owner: str, options: list[str], missing: str
) -> None:
    """The suite makes warnings errors, which must not end the session."""
    run = _run(pair, modules, owner, options)
    assert run.count() == {"PASSED": 2}
    text = f"pytest-accel does not know release {version(plugin)} of {plugin}, which has no {_name(owner)}: of marked"
    assert run.text.count(text) == 1
    assert missing in run.text[run.text.index(text) :].partition("\n")[0]


@pytest.mark.parametrize(
    ("modules", "plugin", "owner", "options", "damage"),
    _rows(
        (
            ["pytest_django.plugin"],
            "pytest-django",
            "pytest_django.fixtures:_set_suffix_to_test_databases",
            ["-n1"],
            "ranks would share their test databases",
        ),
        (*_FORKED, [], "it would fork the pytest process"),
        (*_ORDER, ["--error-on-failed-ordering"], "marked tests that cannot be ordered would pass"),
        (*_SNAPSHOT, ["--snapshot-update"], "each rank would write or delete snapshots"),
        (*_SYRUPY, [], "the snapshots of marked tests would count as unused, and --snapshot-update would delete them"),
    ),
)
def test_an_unknown_release_is_refused_where_it_would_do_damage(
    pair: Pair, modules: list[str], plugin: str, owner: str, options: list[str], damage: str
) -> None:
    """One is refused for its option, others for a fixture (syrupy), for a mark (pytest-forked), or in any case."""
    tests = _TESTS
    if plugin == "syrupy":
        tests = tests.replace("rank)", "rank, snapshot)")
    if plugin == "pytest-forked":
        tests = tests.replace("@pytest.mark.dist", "@pytest.mark.forked\n    @pytest.mark.dist")
    run = _run(pair, modules, owner, options, tests)
    output = run.text + run.errors
    text = f"ERROR: pytest-accel does not know release {version(plugin)} of {plugin}, which has no {_name(owner)}: "
    assert f"{text}{damage}" in output
    assert f"; install another release, or switch it off with -p no:{modules[0]}" in output
    assert run.ret == pytest.ExitCode.USAGE_ERROR


@needs("pytest_benchmark")
def test_functions_run_once_with_an_unknown_release_of_pytest_benchmark(pair: Pair) -> None:
    """Ranks that chose the number of rounds by themselves would wait for each other in the collective."""
    tests = """
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
    run = _run(pair, _BENCHMARK[0], "pytest_benchmark.fixture:BenchmarkFixture._calibrate_timer", [], tests)
    assert run.count() == {"PASSED": 1}
    assert [pair.marked.read(f"calls{rank}") for rank in (0, 1)] == [["call"], ["call"]]


@needs("pytest_html", "pytest_metadata")
def test_data_that_a_bridge_cannot_read_while_a_test_runs_is_missing(pair: Pair) -> None:
    pair.plugin("pytest_metadata.plugin", "pytest_html.fixtures", "pytest_html.plugin")
    pair.write(
        "test_it.py",
        """
        import pytest


        class Unreadable:
            def __str__(self):
                raise AttributeError("no text")


        @pytest.mark.distributed(2, kind="cpu")
        @pytest.mark.parametrize("where", ["in-rank", "in-driver"])
        def test_in_ranks(extras, where):
            extras.append(Unreadable() if where == "in-rank" else "no mapping")
        """,
    )
    for test, error in (
        ("in-rank", "AttributeError: no text"),
        ("in-driver", "TypeError: 'str' object is not a mapping"),
    ):
        run = pair.marked.run("--html=x.html", "-k", test)
        assert run.count() == {"PASSED": 1}
        text = f"pytest-accel does not know release {version('pytest-html')} of pytest-html ({error}): of marked tests"
        assert run.text.count(text) == 1


def _run(pair: Pair, modules: list[str], owner: str, options: list[str], tests: str = _TESTS) -> Run:
    """Run tests with the plugins `modules`, after the internal `owner` has been removed from one of them."""
    pair.plugin(*modules)
    place, _, name = owner.rpartition("." if owner.count(":") and "." in owner.partition(":")[2] else ":")
    pair.write("conftest.py", _CONFTEST.format(place=place, name=name))
    pair.write("test_it.py", tests)
    run = pair.marked.run(*options)
    assert "INTERNALERROR" not in run.text + run.errors
    return run


def _name(owner: str) -> str:
    return owner.replace(":", ".").rpartition(".")[2]
