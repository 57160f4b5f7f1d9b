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
    """Provide a suite and installed modules that record their importers; ``unfit`` also starts a thread."""
    site = suite.path / "site-packages"
    for name in ("heavy", "light", "cupy", "jax"):
        suite.write(f"site-packages/{name}.py", _RECORD_IMPORT.format(name=str(suite.path / name)))
    suite.write(
        "site-packages/unfit.py",
        _RECORD_IMPORT.format(name=str(suite.path / "unfit"))
        + "import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    suite.ini("norecursedirs = site-packages")
    return suite


def _importers(suite: Suite, name: str) -> tuple[int, int]:
    """Return the numbers of processes that have imported the module `name`: of the four ranks, and of others."""
    importers, ranks = set(suite.read(f"{name}.pids")), set(suite.read("ranks.pids"))
    assert len(ranks) == 4
    return len(importers & ranks), len(importers - ranks)


def test_auto_preloads_what_tests_and_conftests_import(preload_suite: Suite) -> None:
    """A package whose runtime does not survive a fork is left out; the fork server still imports the others."""
    preload_suite.write("helper.py", "import light\n")
    preload_suite.write("conftest.py", "import helper\n")
    preload_suite.write("test_heavy.py", _TEST.format(name="cupy, heavy, helper"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    assert _importers(preload_suite, "heavy") == (0, 2)  # The driver and the fork server.
    assert _importers(preload_suite, "light") == (0, 2)
    assert _importers(preload_suite, "cupy") == (4, 1)
    assert "accel: preload: cupy is left out: its CUDA runtime does not survive a fork" in run.text


@pytest.mark.long
def test_modules_that_the_setting_names_are_preloaded_and_failures_reported_with_v(preload_suite: Suite) -> None:
    preload_suite.ini("accel_preload = heavy, own, no_such_module")
    preload_suite.write("site-packages/own.py", "import sys\nassert sys.argv[0] != '-c'\n")  # Fails in the fork server.
    preload_suite.write("test_heavy.py", _TEST.format(name="heavy, light, own"))
    quiet = preload_suite.run("-k", "one", quiet=True)
    assert "1 passed" in quiet.text
    assert "accel: preload" not in quiet.text
    for name in ("heavy", "light", "ranks"):
        (preload_suite.path / f"{name}.pids").unlink()

    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    assert _importers(preload_suite, "heavy") == (0, 2)
    assert _importers(preload_suite, "light") == (4, 1)
    assert "accel: preload: own could not be imported (AssertionError: )" in run.text


@pytest.mark.long
def test_modules_that_are_not_preloaded_are_imported_by_each_rank(preload_suite: Suite) -> None:
    """Plugins are preloaded even then if they are installed and named on the command line, or found by pytest."""
    preload_suite.ini("accel_preload = none")
    preload_suite.write("mine.py", _RECORD_IMPORT.format(name=str(preload_suite.path / "mine")))
    preload_suite.write("test_light.py", _TEST.format(name="light").replace(", fresh=True", ""))
    run = preload_suite.run("--accel-fresh", "-p", "heavy", "-p", "mine")
    assert run.count() == {"PASSED": 2}
    assert _importers(preload_suite, "light") == (4, 1)
    assert _importers(preload_suite, "heavy") == (0, 2)
    assert _importers(preload_suite, "mine") == (4, 1)  # The project's own plugin.


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the test counts processes as Linux forks them")
def test_modules_that_start_threads_are_not_preloaded(preload_suite: Suite) -> None:
    preload_suite.ini("accel_preload = unfit")
    preload_suite.write("test_unfit.py", _TEST.format(name="unfit"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    assert "ranks start without what is preloaded, since importing unfit starts threads" in run.text
    assert _importers(preload_suite, "unfit")[0] == 4


@pytest.mark.long
def test_a_package_that_imports_jax_is_not_preloaded(preload_suite: Suite) -> None:
    preload_suite.write("site-packages/neural.py", "import jax\n")
    preload_suite.write("test_neural.py", _TEST.format(name="neural"))
    run = preload_suite.run()
    assert run.count() == {"PASSED": 2}
    cause = "imports jax (its runtime has threads, which do not survive a fork)"
    assert f"accel: preload: ranks start without what is preloaded, since importing neural {cause}" in run.text
    assert _importers(preload_suite, "jax")[0] == 4


@pytest.mark.long
def test_unusual_packages_do_not_make_the_preload_fail(preload_suite: Suite) -> None:
    """These are a package with vendored packages, one with another copy of OpenBLAS, and one installed by a test.

    setuptools adds a folder with copies of packages to `sys.path`; the fork server does not find these copies. A rank
    uses the fork server's cache of installed packages only while its session starts.
    """
    preload_suite.write(
        "site-packages/zoo/__init__.py",
        "import os, sys\nsys.path.append(os.path.join(os.path.dirname(__file__), 'copies'))\nimport within\n",
    )
    preload_suite.write("site-packages/zoo/copies/within/__init__.py", "")
    # The import of `helper` makes both packages known at once, so they are imported in the order of their names.
    preload_suite.write("helper.py", "import zoo\n")
    preload_suite.write("test_zoo.py", _TEST.format(name="helper"))
    if importlib.util.find_spec("scipy") is not None:
        preload_suite.write("site-packages/solver.py", "import scipy.linalg\n")
        preload_suite.write("test_solver.py", _TEST.format(name="solver"))
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
    run = preload_suite.run()
    assert run.count() == {"PASSED": len(run.results)}
    assert "accel: preload" not in run.text
