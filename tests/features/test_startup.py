"""Tests of the start of a session without marked tests: it imports few modules, and shows no line of the plugin."""

from __future__ import annotations

import json

import pytest

from tests.features.conftest import Suite

MAX_MODULES = 14
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
    run = suite.run("--accel=auto", *options)
    assert run.count() == {"PASSED": 1}
    if process == "main":  # The controller of workers shows its line before it knows which tests they collect.
        assert "accel: " not in run.text
    imported = set(json.loads((suite.path / f"{process}.json").read_text()))
    own = sorted(name for name in imported if name.partition(".")[0] == "pytest_accel")
    assert len(own) <= MAX_MODULES, own
    assert not imported & HEAVY_MODULES
