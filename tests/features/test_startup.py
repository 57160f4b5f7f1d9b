"""Tests of the start of a session: the modules that it imports, and the line about its devices."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

MAX_MODULES = 18
"""Modules and packages of the plugin. Each import costs at least half a millisecond in every session."""
HEAVY_MODULES = {"psutil", "pynvml", "multiprocessing", "torch"}
_CONFTEST = """
    import json
    import os
    import sys


    def pytest_unconfigure(config):
        who = os.environ.get("PYTEST_XDIST_WORKER", "main")
        with open(f"{who}.json", "w") as file:
            json.dump(sorted(sys.modules), file)
    """


@pytest.mark.parametrize(
    ("options", "process"),
    [
        # pytest looks at all files of a folder, but collects only those that the command line names.
        pytest.param(("test_it.py",), "main", id="plain"),
        pytest.param(("test_it.py", "-n1"), "gw0", id="worker"),
        pytest.param(("-m", "not distributed"), "main", id="deselected"),
    ],
)
def test_a_session_without_marks_imports_few_modules(suite: Suite, options: tuple[str, ...], process: str) -> None:
    suite.new_interpreters()
    suite.write("conftest.py", _CONFTEST)
    suite.write("test_it.py", "def test_it():\n    pass\n")
    suite.write("test_other.py", "import pytest\n\n\n@pytest.mark.distributed(2)\ndef test_marked():\n    pass\n")
    assert suite.run("--accel=auto", *options).count() == {"PASSED": 1}
    imported = set(json.loads((suite.path / f"{process}.json").read_text()))
    own = sorted(name for name in imported if name.partition(".")[0] == "pytest_accel")
    assert len(own) <= MAX_MODULES, own
    assert not imported & HEAVY_MODULES


def test_nothing_is_said_at_exit_if_the_modules_finder_has_been_removed() -> None:
    code = "import sys; before = sys.meta_path[:]; import pytest_accel; sys.meta_path[:] = before"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_pytest_does_not_rewrite_the_modules_of_the_plugin(suite: Suite) -> None:
    """If the package was installed from a wheel, pytest marks all packages of a plugin for rewriting."""
    suite.write("rewrites.py", "import pytest\n\npytest.register_assert_rewrite('pytest_accel')\n")
    suite.ini("addopts = -p rewrites")
    suite.write(
        "conftest.py",
        """
        import json
        import sys


        def pytest_unconfigure(config):
            own = [module for name, module in sys.modules.items() if name.startswith("pytest_accel.")]
            with open("loaders.json", "w") as file:
                json.dump([type(module.__loader__).__name__ for module in own], file)
        """,
    )
    suite.write("test_it.py", "def test_it():\n    pass\n")
    assert suite.run().count() == {"PASSED": 1}
    assert set(json.loads((suite.path / "loaders.json").read_text())) == {"SourceFileLoader"}


@pytest.mark.long(except_for="verbose")
@pytest.mark.parametrize(
    ("options", "lines"), [((), 1), (("-q",), 0), (("-n1",), 1)], ids=["verbose", "quiet", "xdist"]
)
def test_the_devices_are_shown_once_if_a_test_is_marked(suite: Suite, options: tuple[str, ...], lines: int) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(1)
        def test_marked():
            pass
        """,
    )
    text = suite.run(*options, quiet=bool(lines == 0)).text
    assert text.count("accel: sim, 4 devices: 4 x sim, order fastest") == lines
    assert "accel: sim" not in suite.run("--deselect", "test_it.py").text
