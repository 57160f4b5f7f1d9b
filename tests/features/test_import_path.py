"""Tests of the folders from which ranks, and the processes behind them, import modules."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.background_suite import BackgroundSuite, suite

__all__ = ["suite"]

PLANTED = ("signal", "socket", "pickle", "psutil")
"""Modules that the plugin's processes import."""


def script(folder: Path) -> tuple[str, str]:
    """Write a script that starts pytest as the command `pytest` does, to `folder`; return the command that runs it."""
    path = folder / "start.py"
    path.write_text("import sys\n\nimport pytest\n\nsys.exit(pytest.main())\n")
    return sys.executable, str(path)


def test_a_session_imports_no_module_of_the_folder_in_which_the_command_pytest_is_started(
    suite: BackgroundSuite,
) -> None:
    suite.without_torch()
    for name in PLANTED:
        suite.write(f"{name}.py", "raise SystemExit(open('planted', 'a').write(f'{__name__}\\n'))\n")
    suite.write("module_of_the_folder.py", "")
    suite.write(
        "tests/test_path.py",
        """
        import importlib.util
        from multiprocessing import shared_memory

        import pytest


        @pytest.mark.distributed(2, init=False)
        def test_ranks():
            assert importlib.util.find_spec("module_of_the_folder") is None
            block = shared_memory.SharedMemory(create=True, size=8)
            block.close()
            block.unlink()


        @pytest.mark.devices(1)
        def test_launch(launch, tmp_path):
            (tmp_path / "script.py").write_text("print(1)")
            launch(tmp_path / "script.py", launcher="python")
        """,
    )
    run = suite.start("tests", program=script(suite.temporary)).finish()
    run.expect({"test_ranks": "PASSED", "test_launch": "PASSED"})
    assert not (suite.path / "planted").exists()


def test_ranks_import_from_the_folder_in_which_python_m_pytest_is_started(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write("module_of_the_folder.py", "import os\n\nPID = os.getpid()\n")
    suite.write(
        "tests/test_path.py",
        """
        import os

        import pytest

        import module_of_the_folder


        @pytest.mark.distributed(2, init=False)
        def test_ranks():
            assert module_of_the_folder.PID == os.getpid()
        """,
    )
    suite.run("tests").expect({"test_ranks": "PASSED"})
