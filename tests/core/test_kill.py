"""Tests of the functions that kill processes."""

from __future__ import annotations

import psutil
import pytest

from pytest_accel.core import kill


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
