"""Sessions as editors start and stop them.

The environment variable VSCODE_PYTHON_FILES names the folder `python_files` of VS Code's Python extension, for the test
that uses its plugin `vscode_pytest`, which is not on PyPI. Other tests use a plugin with the same hooks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.test_reporters import VSCODE
from tests.patience import Limit, stretched

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_PATIENCE = 60.0
"""Seconds of a machine that is not busy after which what a test waits for counts as never coming."""
_FOLDER = os.environ.get("VSCODE_PYTHON_FILES")
_STOPPED = """
    import time
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, device="cpu")


    def test_passes():
        pass


    def test_fails(rank):
        assert rank == 2


    def test_skips():
        pytest.skip("not today")


    def test_waits(rank):
        Path(f"waits.{rank}").touch()
        time.sleep(600)
    """


def _eventually(what: str, look: Callable[[], object]) -> None:
    limit = Limit(_PATIENCE)
    while not look():
        assert not limit.is_over, f"waited for {what} in vain"
        time.sleep(0.02)


def _results(sent: bytes) -> dict[str, str]:
    """Return the outcome of each test, by its name, from messages of either plugin."""
    text = sent.decode()
    rpc = re.findall(r'"test": "[^"]*::(\w+)", "outcome": "(\w+)"', text)
    return dict(rpc or re.findall(r'^\["[^"]*::(\w+)", "(\w+)"', text, re.MULTILINE))


@pytest.mark.parametrize(
    "plugin",
    [
        "same hooks",
        pytest.param("VS Code's", marks=pytest.mark.skipif(_FOLDER is None, reason="VSCODE_PYTHON_FILES is not set")),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_results_reach_an_editor_that_stops_the_session(suite: Suite, plugin: str, number: signal.Signals) -> None:
    """The editor reads the results from a pipe until its end, which is kept open by no rank."""
    suite.write("test_it.py", _STOPPED)
    if plugin == "same hooks":
        suite.write("vscode_pytest.py", VSCODE)
    folder = str(suite.path) if plugin == "same hooks" else str(_FOLDER)
    os.mkfifo(suite.path / "pipe")
    sent: list[bytes] = []
    reader = threading.Thread(target=lambda: sent.append((suite.path / "pipe").read_bytes()), daemon=True)
    reader.start()
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "accel", "-p", "vscode_pytest", "--rootdir", str(suite.path)],
        cwd=suite.path,
        env={**os.environ, "PYTHONPATH": path, "TEST_RUN_PIPE": str(suite.path / "pipe")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as session:
        waits = [suite.path / f"waits.{rank}" for rank in (0, 1)]
        _eventually("the last test", lambda: session.poll() is not None or all(map(Path.exists, waits)))
        session.send_signal(number)
        text, _ = session.communicate(timeout=stretched(_PATIENCE))
    print(text)
    assert session.returncode == (2 if number == signal.SIGINT else -number)
    reader.join(stretched(_PATIENCE))
    assert not reader.is_alive()
    results = _results(sent[0])
    results.pop("test_waits", None)
    assert results == {"test_passes": "success", "test_fails": "failure", "test_skips": "skipped"}
