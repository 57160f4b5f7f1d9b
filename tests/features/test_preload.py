"""Tests of modules that the fork server preloads. The suites' modules record the processes that import them."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_RECORD_IMPORT = """
    import os
    from pathlib import Path

    with open({name!r} + ".pids", "a") as file:
        print(os.getpid(), file=file)
    """
_TEST = """
    import os

    import pytest
    import {name}


    @pytest.mark.distributed(2, device="cpu", fresh=True)
    def test_one():
        with open("ranks.pids", "a") as file:
            print(os.getpid(), file=file)


    @pytest.mark.distributed(2, device="cpu", fresh=True)
    def test_two():
        with open("ranks.pids", "a") as file:
            print(os.getpid(), file=file)
    """


@pytest.fixture
def preload_suite(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """Provide a suite and two installed modules that record their importers; ``unfit`` also starts a thread."""
    site = suite.path / "site-packages"
    suite.write("site-packages/heavy.py", _RECORD_IMPORT.format(name=str(suite.path / "heavy")))
    suite.write(
        "site-packages/unfit.py",
        _RECORD_IMPORT.format(name=str(suite.path / "unfit"))
        + "import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    suite.ini("norecursedirs = site-packages")
    return suite


def _importers(suite: Suite, name: str) -> tuple[set[str], set[str]]:
    """Return the ids of the processes that have imported the module `name`: of ranks, and of others."""
    importers, ranks = set(suite.read(f"{name}.pids")), set(suite.read("ranks.pids"))
    return importers & ranks, importers - ranks


def test_auto_preloads_what_tests_import(preload_suite: Suite) -> None:
    preload_suite.write("test_heavy.py", _TEST.format(name="heavy"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(preload_suite, "heavy")
    assert not ranks
    assert len(others) == 2  # The driver and the fork server.


@pytest.mark.long
def test_auto_preloads_what_conftests_have_imported(preload_suite: Suite) -> None:
    preload_suite.write("helper.py", "import heavy\n")
    preload_suite.write("conftest.py", "import helper\n")
    preload_suite.write("test_heavy.py", _TEST.format(name="helper"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(preload_suite, "heavy")
    assert not ranks
    assert len(others) == 2


@pytest.mark.long
@pytest.mark.parametrize("setting", ["none", "json"])
def test_modules_that_are_not_preloaded_are_imported_by_each_rank(preload_suite: Suite, setting: str) -> None:
    preload_suite.ini(f"accel_preload = {setting}")
    preload_suite.write("test_heavy.py", _TEST.format(name="heavy").replace(", fresh=True", ""))
    run = preload_suite.run("--accel-fresh")
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(preload_suite, "heavy")
    assert len(ranks) == 4
    assert len(others) == 1


@pytest.mark.long
def test_modules_that_the_setting_names_are_preloaded(preload_suite: Suite) -> None:
    preload_suite.ini("accel_preload = heavy, no_such_module")
    preload_suite.write("test_heavy.py", _TEST.format(name="heavy"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(preload_suite, "heavy")
    assert not ranks
    assert len(others) == 2


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the test counts processes as Linux forks them")
@pytest.mark.parametrize("setting", ["auto", "unfit"])
def test_modules_that_start_threads_are_not_preloaded(preload_suite: Suite, setting: str) -> None:
    preload_suite.ini(f"accel_preload = {setting}")
    preload_suite.write("test_unfit.py", _TEST.format(name="unfit"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    assert "ranks start without what is preloaded, since importing unfit starts threads" in run.text
    assert len(_importers(preload_suite, "unfit")[0]) == 4


@pytest.mark.long
def test_copies_of_openblas_and_vendored_packages_do_not_prevent_preloading(preload_suite: Suite) -> None:
    """setuptools adds a folder with copies of packages to `sys.path`; the fork server does not find these copies."""
    files = 1
    if importlib.util.find_spec("scipy") is not None:  # It loads another copy of OpenBLAS.
        files += 1
        preload_suite.write("site-packages/solver.py", "import scipy.linalg\n")
        preload_suite.write("test_solver.py", _TEST.format(name="solver"))
    preload_suite.write(
        "site-packages/zoo/__init__.py",
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), 'copies'))\nimport within\n",
    )
    preload_suite.write("site-packages/zoo/copies/within/__init__.py", "")
    # The import of `helper` makes both packages known at once, so they are imported in the order of their names.
    preload_suite.write("helper.py", "import zoo\n")
    preload_suite.write("test_zoo.py", _TEST.format(name="helper"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2 * files}
    assert "accel: preload" not in run.text


@pytest.mark.long
def test_an_installed_plugin_on_the_command_line_is_imported_once(preload_suite: Suite) -> None:
    """The same holds for plugins that pytest finds by itself. Each rank imports the project's own plugins."""
    preload_suite.ini("accel_preload = none")
    preload_suite.write("mine.py", _RECORD_IMPORT.format(name=str(preload_suite.path / "mine")))
    preload_suite.write("test_plugins.py", _TEST.format(name="os"))
    run = preload_suite.run("-p", "heavy", "-p", "mine")
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(preload_suite, "heavy")
    assert (len(ranks), len(others)) == (0, 2)
    ranks, others = _importers(preload_suite, "mine")
    assert (len(ranks), len(others)) == (4, 1)


@pytest.mark.long
def test_a_test_finds_packages_installed_during_the_session(preload_suite: Suite) -> None:
    """A rank uses the fork server's cache of installed packages only while its session starts."""
    preload_suite.write(
        "test_finds.py",
        """
        from importlib import metadata
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(2, device="cpu")
        def test_finds(rank, process_group):
            folder = Path("site-packages", "late-1.0.dist-info")
            if rank == 0:
                folder.mkdir(parents=True)
                folder.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: late\\nVersion: 1.0\\n")
            process_group.barrier().wait()
            assert "late" in {found.metadata["Name"] for found in metadata.distributions()}
        """,
    )
    assert preload_suite.run().count() == {"PASSED": 1}


@pytest.mark.long
def test_a_failed_preload_is_reported_in_verbose_sessions_only(preload_suite: Suite) -> None:
    preload_suite.write("site-packages/own.py", "import sys\nassert sys.argv[0] != '-c'\n")  # Fails in the fork server.
    preload_suite.write("test_own.py", _TEST.format(name="own"))
    quiet = preload_suite.run(quiet=True)
    assert "2 passed" in quiet.text
    assert "accel: preload" not in quiet.text
    assert "accel: preload: own could not be imported (AssertionError: )" in preload_suite.run().text


def test_a_package_whose_runtime_does_not_survive_a_fork_is_left_out(preload_suite: Suite) -> None:
    """The fork server still imports the other packages."""
    preload_suite.write("site-packages/cupy.py", _RECORD_IMPORT.format(name=str(preload_suite.path / "cupy")))
    preload_suite.write("test_heavy.py", _TEST.format(name="cupy, heavy"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    assert "accel: preload: cupy is left out: its CUDA runtime does not survive a fork" in run.text
    assert [len(found) for found in _importers(preload_suite, "cupy")] == [4, 1]
    assert [len(found) for found in _importers(preload_suite, "heavy")] == [0, 2]


@pytest.mark.long
def test_a_package_that_imports_jax_is_not_preloaded(preload_suite: Suite) -> None:
    preload_suite.write("site-packages/jax.py", _RECORD_IMPORT.format(name=str(preload_suite.path / "jax")))
    preload_suite.write("site-packages/neural.py", "import jax\n")
    preload_suite.write("test_neural.py", _TEST.format(name="neural"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    cause = "imports jax (its runtime has threads, which do not survive a fork)"
    assert f"accel: preload: ranks start without what is preloaded, since importing neural {cause}" in run.text
    assert len(_importers(preload_suite, "jax")[0]) == 4
