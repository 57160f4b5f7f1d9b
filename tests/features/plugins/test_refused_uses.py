"""Tests of uses of plugins that are refused with marked tests, and of the same plugins in uses that work."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from pytest_accel.features.plugins.refusals import REFUSALS
from tests.features.conftest import Suite
from tests.features.plugins.conftest import Pair, needs

_PLUGINS = {
    "pytest_arraydiff": "pytest_arraydiff.plugin",
    "pytest_codspeed": "codspeed",  # The name of its entry point, which registers `codspeed_plugin`.
    "pytest_datadir": "pytest_datadir.plugin",
    "pytest_deadfixtures": "pytest_deadfixtures",
    "pytest_examples": "pytest_examples",
    "pytest_flakefinder": "pytest_flakefinder",
    "pytest_insta": "pytest_insta.plugin",
    "pytest_isolate": "pytest_isolate.plugin",
    "pytest_memray": "memray",
    "pytest_mpl": "pytest_mpl.plugin",
    "pytest_regressions": "pytest_regressions.plugin",
    "pytest_run_parallel": "pytest_run_parallel.plugin",
}
_SUITE = """
    import os

    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np
    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    HEIGHT = float(os.environ.get("HEIGHT", "1")) if LAST else 1.0
    ranks = pytest.mark.distributed(2, kind="cpu")

    @ranks
    @pytest.mark.array_compare
    def test_array(): return np.arange(3.0) * HEIGHT

    @ranks
    @pytest.mark.mpl_image_compare
    def test_image():
        figure, axes = plt.subplots(figsize=(2, 2))
        axes.plot([0, HEIGHT])
        return figure

    @ranks
    def test_data(data_regression): data_regression.check({"height": HEIGHT})

    @ranks
    def test_snapshot(snapshot): assert snapshot("height.txt") == str(HEIGHT)

    @ranks
    def test_benchmark(codspeed_benchmark): assert codspeed_benchmark(sum, [1, 2]) == 3
    """
_THREAD_UNSAFE = """
    import os

    def pytest_itemcollected(item):
        if item.get_closest_marker("distributed") and "THREADS" not in os.environ:
            item.add_marker("thread_unsafe")
    """
_WRITE = "would have each rank of a marked test write the same files"
_REFUSED = {
    "--arraydiff-generate-path=new": f"--arraydiff-generate-path {_WRITE}: do without it, or deselect marked tests",
    "--dup-fixtures": "--dup-fixtures cannot compare fixtures of ranks",
    "--update-examples": f"--update-examples {_WRITE}",
    "--flake-max-minutes=1": "--flake-max-minutes would let ranks disagree on the end",
    "--insta=update": f"--insta=update, record and review {_WRITE}",
    "--memray": "pytest-memray cannot measure the memory of ranks",
    "--isolate": "pytest-isolate runs a test in a fork of the pytest process",
    "--mpl-generate-path=new": f"a folder of pytest-mpl for images or results {_WRITE}",
    "--force-regen": f"--force-regen and --regen-all {_WRITE}",
    "--parallel-threads=2": "pytest-run-parallel would mix up the collectives of a marked test",
}
_COMPARE = ("--mpl", "--arraydiff", "--no-isolate", "--parallel-threads=2", "-Wdefault")


def _files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the reference files below `folder`."""
    found = re.compile(r"^(new|baseline|reference|snapshots|test_it)/")
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if found.match(name)}


@needs(*_PLUGINS)
def test_options_that_write_reference_files_or_cannot_work_are_refused_and_files_are_compared(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    pair.plugin(*_PLUGINS.values())
    pair.write("test_it.py", _SUITE)
    pair.write("conftest.py", _THREAD_UNSAFE)
    generate = ("--mpl-generate-path=baseline", "--arraydiff-generate-path=reference", "--insta=update", "--regen-all")
    pair.plain.run(*generate, "-Wdefault")
    expected = _files(pair.plain.path)
    assert len(expected) == 4
    for name in {name.partition("/")[0] for name in expected}:
        shutil.copytree(pair.plain.path / name, pair.marked.path / name)

    monkeypatch.setenv("THREADS", "1")
    refused = pair.marked.run(*_REFUSED, "-Wdefault")
    monkeypatch.delenv("THREADS")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert [text for text in _REFUSED.values() if text not in refused.text + refused.errors] == []
    measured = pair.marked.run("--codspeed", "-Wdefault")  # It deselects tests that are no benchmarks.
    assert "pytest-codspeed would run functions unequally often on ranks" in measured.text + measured.errors
    assert _files(pair.marked.path) == expected

    assert pair.marked.run(*_COMPARE).count() == {"PASSED": 5}
    monkeypatch.setenv("HEIGHT", "4")
    changed = pair.marked.run(*_COMPARE, "-n1")
    assert changed.count() == {"PASSED": 1, "FAILED": 4}
    for test in ("test_array", "test_image", "test_data", "test_snapshot"):
        assert "rank 0: passed" in changed.failure(test)
    assert _files(pair.marked.path) == expected


_ONE_RANK = """
    import pytest

    @pytest.mark.devices
    def test_data(data_regression, device): data_regression.check({"height": 2.0})

    @pytest.mark.devices(9)
    @pytest.mark.isolate
    def test_cannot_run(): pass
    """


@needs("pytest_regressions", "pytest_datadir", "pytest_isolate", "pytest_forked")
def test_a_test_of_one_rank_writes_files_and_tests_that_cannot_run_refuse_nothing(suite: Suite) -> None:
    for name in ("pytest_datadir", "pytest_regressions", "pytest_isolate"):
        suite.plugin(_PLUGINS[name])
    suite.write("test_one.py", _ONE_RANK)
    run = suite.run("--regen-all", "-Wdefault")
    assert run.outcomes() == {"test_data": "PASSED", "test_cannot_run": "SKIPPED"}
    assert (suite.path / "test_one" / "test_data.yml").read_text() == "height: 2.0\n"
    suite.plugin("pytest_forked")
    refused = suite.run("--forked", "-Wdefault")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert "pytest-forked runs a test in a fork of the pytest process" in refused.text + refused.errors


@needs(*_PLUGINS, "pytest_order", "pytest_recording", "pytest_reportportal", "testmon")
def test_plugins_of_refusals_have_these_names() -> None:
    names = {one.plugin for one in REFUSALS} - {"codspeed_plugin", "memray_manager"}
    assert {name for name in names if importlib.util.find_spec(name) is None} == set()


_PAGE = Path(__file__).parents[3] / "docs" / "reference" / "plugins.md"
_RESULTS = """
    import json

    import pytest
    from pytest_harvest import get_session_results_dct

    def pytest_sessionfinish(session):
        if not (hasattr(session.config, "workerinput") or session.config.pluginmanager.has_plugin("accel-rank")):
            found = get_session_results_dct(session)
            bags = {name: one["fixtures"].get("results_bag") for name, one in found.items()}
            (session.config.rootpath / "bags.json").write_text(json.dumps(bags))
    """
_HARVESTED = """
    import pytest

    @pytest.mark.distributed(2, kind="cpu")
    def test_in_ranks(results_bag, request): results_bag.loss = 0.25

    def test_unmarked(results_bag): results_bag.loss = 0.5
    """


@needs("pytest_harvest")
def test_the_conftest_of_the_page_brings_results_of_ranks(suite: Suite) -> None:
    suite.plugin("harvest")
    (conftest,) = re.findall(
        r"^```python needs pytest-harvest conftest\n(.*?)^```", _PAGE.read_text(), re.DOTALL | re.M
    )
    suite.write("conftest.py", conftest + textwrap.dedent(_RESULTS))
    suite.write("test_it.py", _HARVESTED)
    run = suite.run("-Wignore", "-n1")
    assert run.count() == {"PASSED": 2}
    bags = json.loads((suite.path / "bags.json").read_text())
    assert bags == {"test_it.py::test_in_ranks": {"loss": 0.25}, "test_it.py::test_unmarked": {"loss": 0.5}}
