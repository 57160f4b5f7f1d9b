"""Tests of the functions that kill processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing import resource_tracker

import psutil
import pytest

from pytest_accel.core import kill
from tests.deadline import eventually, scaled

SLEEP = (sys.executable, "-Wignore::UserWarning:multiprocessing.resource_tracker", "-c", "input()")


@contextlib.contextmanager
def running(command: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and kill it at the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_whose_warning_filter_names_the_resource_tracker_is_killed() -> None:
    resource_tracker.ensure_running()
    tracker = kill.resource_tracker_pid()
    assert tracker is not None
    eventually("the tracker's program to begin", partial(kill.cleans_up, tracker))  # It may have just been forked.
    with running(SLEEP) as process:
        assert not kill.cleans_up(process.pid)
        assert [one.pid for one in kill.kill_tree(process.pid)] == [process.pid]
        assert process.wait(scaled(30)) == -signal.SIGKILL


@pytest.mark.parametrize("form", ["loky.backend", "joblib.externals.loky.backend", "multiprocessing"])
def test_a_tracker_is_killed_only_as_the_root(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"from {form}.resource_tracker import main; main(5)"
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: ["python", "-Wignore", "-c", source])
    with running(SLEEP) as process:
        assert kill.cleans_up(process.pid)
        kill.kill_tree(process.pid)
        assert process.wait(scaled(30)) == -signal.SIGKILL
