"""Tests of the process of a launch: its stacks at a timeout, and what remains if it cannot be started."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_accel.features.launch import launch_api
from pytest_accel.features.launch.launch_commands import LAUNCHERS, Job
from pytest_accel.features.launch.launch_result import timed_out
from pytest_accel.features.launch.launched_process import LaunchedProcess
from tests.deadline import eventually
from tests.descriptor_limit import free_descriptors, open_descriptors

HANG_BESIDE_AN_ORPHAN = """
import os, time

def wait_for_ever():
    print("waits", flush=True); time.sleep(600)

if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
wait_for_ever()
"""


def job(script: Path, folder: Path) -> Job:
    """Return the job of a script that is launched without a launcher."""
    return Job(
        launcher="python",
        script=str(script),
        args=(),
        nproc=1,
        module=False,
        launcher_args=(),
        kind="cpu",
        accelerated=False,
        devices=(),
        mask_variables=(),
        environ={**os.environ, "PYTHONFAULTHANDLER": "1"},
        python=sys.executable,
        folder=str(folder),
        port=0,
    )


def launched(script: Path, folder: Path, shown: list[str]) -> LaunchedProcess:
    """Return the process of a launch of `script`, which appends its output to `shown`."""
    made = job(script, folder)
    return LaunchedProcess(made, LAUNCHERS["python"].plan(made), lambda stream, text: shown.append(text))


def test_stacks_are_shown_although_the_launch_has_left_an_orphan(script: Callable[[str], Path], tmp_path: Path) -> None:
    shown: list[str] = []
    path = script(HANG_BESIDE_AN_ORPHAN)
    with launched(path, tmp_path, shown) as process:
        eventually("the script to wait", lambda: process.wait(0.01) is None and "waits\n" in shown)
        result = process.result(process.terminate())
    assert f'File "{path}", line 5 in wait_for_ever' in timed_out("python", result, 1, 1).stacks[0]


@pytest.mark.parametrize("free", [1, 3, 4])
def test_a_launch_without_free_descriptors_leaves_none_open(tmp_path: Path, free: int) -> None:
    before = open_descriptors()
    with free_descriptors(free), pytest.raises(OSError, match="Too many open files"):
        launched(tmp_path / "trainer.py", tmp_path, []).__enter__()
    assert open_descriptors() <= before


def test_a_launcher_that_does_not_print_its_version_in_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(launch_api, "_VERSION_TIMEOUT", 0.05)
    with pytest.raises(TimeoutError, match=rf"^{program} --version did not end within 0.05 s$"):
        launch_api.version_of(str(program))
