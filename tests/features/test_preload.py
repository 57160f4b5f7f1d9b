"""Tests of what the fork server imports. The suites' modules record the processes that import them."""

from __future__ import annotations

import re
import sys

import pytest

from tests.features.conftest import Suite
from tests.installed_packages import InstalledPackages

_RECORD_IMPORT = """
    import os

    with open({name!r} + ".pids", "a") as file:
        print(os.getpid(), file=file)
    """
_HELPER = """
    import os

    from tests.inner import note


    def record_rank():
        note("ranks.pids", os.getpid())
    """
_TEST = """
    import pytest
    import recording
    import {name}


    @pytest.mark.distributed(2, kind="cpu", fresh=True, init=False)
    def test_one():
        recording.record_rank()


    @pytest.mark.distributed(2, kind="cpu", fresh=True, init=False)
    def test_two():
        recording.record_rank()
    """
_READ_FLAG = "import os\nFLAG = os.environ.get('FLAG')\n"
"""A package that reads a variable when it is imported."""


@pytest.fixture
def packages(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> InstalledPackages:
    """Provide a folder of installed packages."""
    return InstalledPackages(suite.path / "site-packages", monkeypatch)


@pytest.fixture
def preload_suite(suite: Suite, packages: InstalledPackages) -> Suite:
    """Provide a suite and installed modules: `heavy` records its importers; ``unfit`` also starts a thread."""
    suite.write("site-packages/heavy.py", _RECORD_IMPORT.format(name=str(suite.path / "heavy")))
    suite.write(
        "site-packages/unfit.py",
        _RECORD_IMPORT.format(name=str(suite.path / "unfit"))
        + "import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    suite.write("site-packages/flagged.py", _READ_FLAG)
    suite.write("recording.py", _HELPER)
    suite.ini("norecursedirs = site-packages")
    return suite


def _importers(suite: Suite, name: str) -> tuple[set[str], set[str]]:
    """Return the ids of the processes that have imported the module `name`: of ranks, and of others."""
    importers, ranks = set(suite.read(f"{name}.pids")), set(suite.read("ranks.pids"))
    return importers & ranks, importers - ranks


def _write_suite_with_changes_before_imports(suite: Suite) -> None:
    """Write tests that see what a file or a mark sets before a package or torch is imported."""
    suite.write(
        "test_file.py",
        """
        import os

        os.environ["FLAG"] = "of the file"
        import flagged
        import pytest


        @pytest.mark.distributed(2, kind="cpu")
        def test_file():
            assert flagged.FLAG == "of the file"
        """,
    )
    suite.write(
        "test_mark.py",
        """
        import pytest


        @pytest.mark.parametrize("number", [1, 2])
        @pytest.mark.distributed(1, kind="cpu", env={"PYTORCH_JIT": "0", "NCCL_DEBUG": "WARN"})
        def test_mark(number, rank, gather, process_group):
            import torch

            assert not torch.jit._state._enabled.enabled
            assert gather(rank) == [0]
        """,
    )
    for name, value in (("late", "0"), ("unchanged", "1")):
        suite.write(
            f"test_{name}.py",
            f"""
            import os

            os.environ["PYTORCH_JIT"] = "{value}"
            import pytest


            @pytest.mark.parametrize("number", [1, 2])
            @pytest.mark.distributed(2, kind="cpu")
            def test_{name}(number):
                assert os.environ["PYTORCH_JIT"] == "{value}"
            """,
        )


def test_what_is_set_before_an_import_has_its_effect_in_ranks(
    preload_suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only torch is imported before: a file that sets one of its variables gets a warning, unless it is the same."""
    _write_suite_with_changes_before_imports(preload_suite)
    monkeypatch.setenv("PYTORCH_JIT", "1")
    run = preload_suite.run("-n1", "--dist=loadfile")  # With `filterwarnings = error`.
    assert run.count() == {"PASSED": 7}, run.text
    warnings = re.findall(r"PreloadWarning: (.*)", run.text)
    assert len(warnings) == 1, run.text
    assert warnings[0].startswith("test_late.py sets PYTORCH_JIT, which torch reads when it is imported: no effect in")
    assert "mark's env=" in warnings[0]
    assert warnings[0].endswith("accel_preload = none")


def test_named_modules_are_imported_once_except_for_a_mark_with_variables_of_unknown_effect(
    preload_suite: Suite,
) -> None:
    preload_suite.without_torch()
    preload_suite.ini("accel_preload = heavy, flagged")
    preload_suite.write("test_heavy.py", _TEST.format(name="heavy"))
    assert preload_suite.run().count() == {"PASSED": 2}
    ranks, others = _importers(preload_suite, "heavy")
    assert not ranks
    assert len(others) == 2  # The driver and the fork server.

    preload_suite.write(
        "test_heavy.py",
        """
        import heavy
        import flagged
        import pytest
        import recording


        @pytest.mark.distributed(2, kind="cpu", env={"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "2"}, init=False)
        def test_known():
            recording.record_rank()


        @pytest.mark.distributed(2, kind="cpu", env={"FLAG": "of the mark"}, init=False)
        def test_unknown():
            assert flagged.FLAG == "of the mark"
            recording.record_rank()
        """,
    )
    assert preload_suite.run().count() == {"PASSED": 2}
    ranks, others = _importers(preload_suite, "heavy")
    assert (len(ranks), len(others)) == (2, 4)


@pytest.mark.long(except_for="threads")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(
            "no_such_module",
            "no_such_module cannot be imported where ranks are forked: ModuleNotFoundError: No module named "
            "'no_such_module'; remove it from accel_preload",
            id="missing",
        ),
        pytest.param(
            "unfit",
            "ranks cannot be forked from a process that has imported unfit: the import starts threads; remove it from "
            "accel_preload, and each rank imports it itself",
            id="threads",
        ),
    ],
)
def test_a_named_module_that_is_not_fit_is_an_error(preload_suite: Suite, name: str, text: str) -> None:
    preload_suite.without_torch()
    preload_suite.ini(f"accel_preload = heavy {name}")
    preload_suite.write("test_one.py", _TEST.format(name="os") + "\n    def test_unmarked():\n        pass\n")
    run = preload_suite.run()
    assert run.count() == {"ERROR": 2, "PASSED": 1}, run.text
    assert run.failure("test_one").strip() == run.failure("test_two").strip() == f"accel_preload: {text}"
    assert run.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.long
def test_an_installed_plugin_is_imported_once_and_one_of_the_suite_by_each_rank(
    preload_suite: Suite, packages: InstalledPackages
) -> None:
    preload_suite.without_torch()
    packages.install("weight", "pytest11", "weight = heavy")
    preload_suite.write("mine.py", _RECORD_IMPORT.format(name=str(preload_suite.path / "mine")))
    preload_suite.write("test_plugins.py", _TEST.format(name="os"))
    run = preload_suite.run("-p", "weight", "-p", "mine")
    assert run.count() == {"PASSED": 2}
    assert [len(found) for found in _importers(preload_suite, "heavy")] == [0, 2]
    assert [len(found) for found in _importers(preload_suite, "mine")] == [4, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="the test counts processes as Linux forks them")
def test_a_plugin_whose_import_starts_a_thread_is_imported_by_each_rank(
    preload_suite: Suite, packages: InstalledPackages
) -> None:
    """Nobody has asked to import it before the fork, so it must not keep the suite from running."""
    preload_suite.without_torch()
    packages.install("threaded", "pytest11", "threaded = unfit")
    preload_suite.write("test_plugins.py", _TEST.format(name="os"))
    log = preload_suite.path / "log.txt"
    run = preload_suite.run("-p", "threaded", f"--accel-log={log}")
    assert run.count() == {"PASSED": 2}, run.text
    assert "starts again, without pytest's plugins: their import starts threads" in log.read_text()
    assert len(_importers(preload_suite, "unfit")[0]) == 4
