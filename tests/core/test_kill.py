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


def test_a_process_that_cannot_be_killed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sleeping:
        """A process in uninterruptible sleep."""

        pid = 71
        kills = 0

        def is_running(self) -> bool:
            return True

        def create_time(self) -> float:
            return 5.0

        def username(self) -> str:
            return "ada"

        def environ(self) -> dict[str, str]:
            return {kill.MARK: kill.mark("/folder", 0)}

        def status(self) -> str:
            return psutil.STATUS_DISK_SLEEP

        def cmdline(self) -> list[str]:
            return ["python"]

        def kill(self) -> None:
            self.kills += 1

    now = [100.0]

    def wait(processes: list[Sleeping], timeout: float) -> None:
        assert sleeping.kills < 1000, "the process is killed forever"
        now[0] += timeout

    sleeping = Sleeping()
    monkeypatch.setattr(psutil, "process_iter", lambda: [sleeping])
    monkeypatch.setattr(psutil, "wait_procs", wait)
    monkeypatch.setattr(kill, "monotonic", lambda: now[0])
    assert kill.kill_marked("/folder") == ((71, 5.0, "process 71 (python; user ada, disk-sleep)"),)
    assert sleeping.kills == 10


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


def test_a_process_that_cannot_be_inspected_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> None:
        raise psutil.AccessDenied(pid)

    with running(SLEEP) as process:
        monkeypatch.setattr(psutil, "Process", refuse)
        kill.kill_tree(process.pid)
        monkeypatch.undo()
        assert process.wait(scaled(30)) == -signal.SIGKILL
