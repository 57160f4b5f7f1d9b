"""Modules that the fork server preloads. The tests' modules record the processes that import them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_NOTES = """
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
def package(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A suite beside two installed modules that note who imports them; `unfit` starts a thread as well."""
    site = suite.path / "site-packages"
    suite.write("site-packages/heavy.py", _NOTES.format(name=str(suite.path / "heavy")))
    suite.write(
        "site-packages/unfit.py",
        _NOTES.format(name=str(suite.path / "unfit"))
        + "import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    suite.ini("norecursedirs = site-packages")
    return suite


def _importers(suite: Suite, name: str) -> tuple[set[str], set[str]]:
    """The processes that have imported the module: ranks, and others."""
    importers, ranks = set(suite.read(f"{name}.pids")), set(suite.read("ranks.pids"))
    return importers & ranks, importers - ranks


def test_auto_preloads_what_tests_import(package: Suite) -> None:
    package.write("test_heavy.py", _TEST.format(name="heavy"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(package, "heavy")
    assert not ranks
    assert len(others) == 2  # The driver and the server.


@pytest.mark.long
def test_auto_preloads_what_conftests_have_imported(package: Suite) -> None:
    package.write("helper.py", "import heavy\n")
    package.write("conftest.py", "import helper\n")
    package.write("test_heavy.py", _TEST.format(name="helper"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(package, "heavy")
    assert not ranks
    assert len(others) == 2


@pytest.mark.long
@pytest.mark.parametrize("setting", ["none", pytest.param("json", marks=pytest.mark.nightly)])
def test_modules_that_are_not_preloaded_are_imported_by_each_rank(package: Suite, setting: str) -> None:
    package.ini(f"accel_preload = {setting}")
    package.write("test_heavy.py", _TEST.format(name="heavy").replace(", fresh=True", ""))
    run = package.run("--accel-fresh")
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(package, "heavy")
    assert len(ranks) == 4
    assert len(others) == 1


@pytest.mark.long
def test_modules_that_the_setting_names_are_preloaded(package: Suite) -> None:
    package.ini("accel_preload = heavy, no_such_module")
    package.write("test_heavy.py", _TEST.format(name="heavy"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(package, "heavy")
    assert not ranks
    assert len(others) == 2


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the test counts processes as Linux forks them")
@pytest.mark.parametrize("setting", ["auto", "unfit"])
def test_modules_that_start_threads_are_not_preloaded(package: Suite, setting: str) -> None:
    package.ini(f"accel_preload = {setting}")
    package.write("test_unfit.py", _TEST.format(name="unfit"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    assert "ranks start without what is preloaded, since importing unfit starts threads" in run.text
    assert len(_importers(package, "unfit")[0]) == 4


@pytest.mark.long
def test_modules_that_load_another_copy_of_openblas_are_preloaded(package: Suite) -> None:
    pytest.importorskip("scipy")
    package.write("site-packages/solver.py", "import scipy.linalg\n")
    package.write("test_solver.py", _TEST.format(name="solver"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    assert "accel: preload" not in run.text


@pytest.mark.long
def test_an_installed_plugin_on_the_command_line_is_imported_once(package: Suite) -> None:
    """The same holds for plugins that pytest finds by itself. Each rank imports the project's own plugins."""
    package.ini("accel_preload = none")
    package.write("mine.py", _NOTES.format(name=str(package.path / "mine")))
    package.write("test_plugins.py", _TEST.format(name="os"))
    run = package.run("-p", "heavy", "-p", "mine")
    assert run.count() == {"PASSED": 2}
    ranks, others = _importers(package, "heavy")
    assert (len(ranks), len(others)) == (0, 2)
    ranks, others = _importers(package, "mine")
    assert (len(ranks), len(others)) == (4, 1)


@pytest.mark.long
def test_a_test_finds_packages_installed_during_the_session(package: Suite) -> None:
    """The server's cache of installed packages is used only while a rank's session starts."""
    package.write(
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
    assert package.run().count() == {"PASSED": 1}


@pytest.mark.long
def test_a_vendored_package_is_not_preloaded(package: Suite) -> None:
    """setuptools, once imported, has copies of other packages on `sys.path`, where the server does not find them."""
    package.write(
        "site-packages/zoo/__init__.py",
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), 'copies'))\nimport within\n",
    )
    package.write("site-packages/zoo/copies/within/__init__.py", "")
    package.write("helper.py", "import zoo\n")  # So both are known at once, and are imported in their names' order.
    package.write("test_zoo.py", _TEST.format(name="helper"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    assert "accel: preload" not in run.text


@pytest.mark.long
def test_a_failed_preload_is_reported_only_if_the_setting_names_the_module(package: Suite) -> None:
    package.write("site-packages/own.py", "import sys\nassert sys.argv[0] != '-c'\n")  # As only the server is started.
    package.write("test_own.py", _TEST.format(name="own"))
    quiet = package.run(quiet=True)
    assert "2 passed" in quiet.text
    assert "accel: preload" not in quiet.text
    assert "accel: preload: own could not be imported (AssertionError: )" in package.run().text


def test_a_package_whose_runtime_does_not_survive_a_fork_is_left_out(package: Suite) -> None:
    """The server imports the other packages."""
    package.write("site-packages/cupy.py", _NOTES.format(name=str(package.path / "cupy")))
    package.write("test_heavy.py", _TEST.format(name="cupy, heavy"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    assert "accel: preload: cupy is left out: its CUDA runtime does not survive a fork" in run.text
    assert [len(found) for found in _importers(package, "cupy")] == [4, 1]
    assert [len(found) for found in _importers(package, "heavy")] == [0, 2]


@pytest.mark.long
def test_a_package_that_imports_such_a_package_is_not_preloaded(package: Suite) -> None:
    package.write("site-packages/jax.py", _NOTES.format(name=str(package.path / "jax")))
    package.write("site-packages/neural.py", "import jax\n")
    package.write("test_neural.py", _TEST.format(name="neural"))
    run = package.run()
    assert run.count() == {"PASSED": 2}
    why = "imports jax (its runtime has threads, which do not survive a fork)"
    assert f"accel: preload: ranks start without what is preloaded, since importing neural {why}" in run.text
    assert len(_importers(package, "jax")[0]) == 4
