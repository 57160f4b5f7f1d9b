"""Tests of the functions that kill processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from pytest_accel.core import kill
from tests.deadline import scaled

SLEEP = (sys.executable, "-Wignore::UserWarning:multiprocessing.resource_tracker", "-c", "input()")


@contextlib.contextmanager
def running(command: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and kill it at the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("form", ["loky.backend", "joblib.externals.loky.backend", "multiprocessing"])
def test_a_tracker_is_killed_only_as_the_root(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"from {form}.resource_tracker import main; main(5)"
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: ["python", "-Wignore", "-c", source])
    with running(SLEEP) as process:
        assert kill.cleans_up(process.pid)
        kill.kill_tree(process.pid)
        assert process.wait(scaled(30)) == -signal.SIGKILL
