"""Tests of launched scripts that fail: the error, and that no process is left."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_accel import LaunchError, LaunchTimeout
from pytest_accel.core.clock import monotonic
from pytest_accel.features.launch import launched_script
from pytest_accel.features.launch.hooks import Launch
from tests.background_suite import living_processes

Script = Callable[[str], Path]
SEGFAULT = """
import ctypes, os, pathlib, sys, time
there = pathlib.Path(__file__).with_name("rank-0-is-here")
print("rank", os.environ.get("RANK", "0"), "is here", flush=True)
if os.environ.get("RANK") == "0":
    there.touch()
if os.environ.get("RANK", "1") == "1":
    while "RANK" in os.environ and not there.exists():
        time.sleep(0.01)
    print("the last words", file=sys.stderr, flush=True)
    ctypes.string_at(0)
time.sleep(600)
"""
HANG = """
import os, pathlib, time

def wait_for_ever():
    pathlib.Path(__file__).with_name("waits-" + os.environ.get("RANK", "0")).touch()
    time.sleep(600)

if os.fork() == 0:  # An orphan is left beside the rank.
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
print("rank", os.environ.get("RANK", "0"), "waits", flush=True)
wait_for_ever()
"""
DETACHED_PROCESSES = """
import os, subprocess, sys, time

sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    subprocess.Popen(sleep, start_new_session=True)
    os._exit(0)
os.wait()
print("all are there", flush=True)
"""


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> str:
    """Set an environment variable that all launched processes inherit, and provide its name."""
    name = f"LAUNCHED_{uuid.uuid4().hex}"
    monkeypatch.setenv(name, "1")
    return name


def test_an_exit_status_is_reported_with_the_output(launch: Launch, script: Script) -> None:
    path = script("print('to stdout'); raise SystemExit('why it failed')")
    with pytest.raises(LaunchError) as caught:
        launch(path, "a b", launcher="python")
    text = str(caught.value)
    assert text.startswith("python ended with exit status 1\n")
    assert f"trainer.py 'a b'\nfiles: {caught.value.result.folder}\n" in text
    assert "--- rank 0, stdout\nto stdout\n--- rank 0, stderr\nwhy it failed" in text
    assert caught.value.result.stdout == "to stdout\n"
    by_hand = subprocess.run(caught.value.result.command, capture_output=True, encoding="utf-8", check=False)
    assert (by_hand.returncode, by_hand.stdout, by_hand.stderr) == (1, "to stdout\n", "why it failed\n")


@pytest.mark.long(except_for="python")
@pytest.mark.parametrize(
    ("launcher", "flavour", "ended"),
    [
        pytest.param("python", "", "by SIGSEGV", id="python"),
        ("torchrun", "", "with exit status 1: rank 1 by SIGSEGV"),
        ("mpirun", "openmpi", "with exit status 139"),
    ],
)
def test_a_dead_rank_is_reported(
    launch: Launch,
    script: Script,
    marker: str,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    launcher: str,
    flavour: str,
    ended: str,
) -> None:
    if flavour:
        request.getfixturevalue("use_mpi")(flavour)
    with pytest.raises(LaunchError, match=f"^{launcher} ended {ended}\n") as caught:
        launch(script(SEGFAULT), launcher=launcher, nproc=1 if launcher == "python" else 2)
    assert "is here\n--- rank" in str(caught.value)
    assert "the last words\nFatal Python error: Segmentation fault\n" in str(caught.value)
    shown = capsys.readouterr()
    assert re.search(r"^\[rank \d\] rank \d is here$", shown.out, re.MULTILINE)
    assert re.search(rf"^\[rank {1 if launcher == 'torchrun' else '.'}\] the last words$", shown.err, re.MULTILINE)
    assert living_processes(marker, "1") == []


@pytest.mark.long(except_for="python")
@pytest.mark.parametrize("launcher", ["torchrun", "python"])
def test_a_timeout_shows_the_stacks(
    launch: Launch, script: Script, marker: str, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    """The time is over once all ranks wait."""
    size = 1 if launcher == "python" else 2
    path = script(HANG)

    def clock() -> float:
        return monotonic() + (3600 if len(list(path.parent.glob("waits-*"))) == size else 0)

    monkeypatch.setattr(launched_script, "monotonic", clock)
    with pytest.raises(LaunchTimeout) as caught:
        launch(path, launcher=launcher, nproc=size, timeout=3600)
    assert living_processes(marker, "1") == []
    assert len(re.findall(rf'File "{path}", line \d in wait_for_ever', str(caught.value))) == size
    assert [out.strip() for out in caught.value.result.rank_stdout.values()] == [
        f"rank {rank} waits" for rank in range(size)
    ]
    assert str(caught.value).startswith(f"{launcher} did not end within ")


def test_processes_that_a_script_leaves_are_killed(launch: Launch, script: Script, marker: str) -> None:
    result = launch(script(DETACHED_PROCESSES), launcher="python", timeout=60)
    assert result.stdout == "all are there\n"
    assert living_processes(marker, "1") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "mpiexec"}, "launcher='mpiexec'.: allowed are torchrun, accelerate, deepspeed, mpirun, srun, py"),
        ({"nproc": 0}, r"nproc=0\): python starts 1 process, launchers >= 1"),
        ({"launcher": "python", "nproc": 2}, r"nproc=2\): python starts 1 process"),
        ({"timeout": "soon"}, "time 'soon': allowed are seconds >= 0, and texts such as '90s'"),
    ],
)
def test_invalid_arguments_are_errors(launch: Launch, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch("none.py", **arguments)  # type: ignore[arg-type]


def test_a_missing_script_is_reported_by_python(launch: Launch) -> None:
    with pytest.raises(LaunchError, match=f"can't open file '{Path.cwd()}/none.py'"):
        launch("none.py", launcher="python")
