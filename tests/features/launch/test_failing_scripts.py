"""Tests of launched scripts that fail: the error, and that no process is left."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from pytest_accel import LaunchError, LaunchTimeout, NoOutput
from tests.deadline import scaled

if TYPE_CHECKING:
    from pytest_accel.features.launch.launch_api import Launch

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
import os, time

def wait_for_ever():
    print("rank", os.environ.get("RANK", "0"), "waits", flush=True)
    time.sleep(600)

if os.fork() == 0:  # An orphan is left beside the rank.
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os.wait()
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


TERMINATE_AT_EXIT = """
import ctypes

capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
terminate = ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev
held = capsule(1, None, ctypes.cast(terminate, ctypes.c_void_p))  # C code frees it, with this module's globals.
print("all work is done", flush=True)
"""


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> str:
    """Set an environment variable that all launched processes inherit, and provide its name."""
    name = f"LAUNCHED_{uuid.uuid4().hex}"
    monkeypatch.setenv(name, "1")
    return name


def living_processes(name: str) -> list[psutil.Process]:
    """Return all living processes that have the environment variable `name`."""

    def find() -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if name in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    return list(find())


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs libstdc++")
def test_a_signal_and_its_reason_are_shown(launch: Launch, script: Script) -> None:
    """The threads of a process group abort the process in the same way if they run when Python exits."""
    with pytest.raises(LaunchError, match=r"^python ended by SIGABRT\n") as caught:
        launch(script(TERMINATE_AT_EXIT), launcher="python")
    assert "--- rank 0, stdout\nall work is done\n" in str(caught.value)
    assert "\nterminate called without an active exception\nFatal Python error: Aborted\n" in str(caught.value)


@pytest.mark.long
def test_a_dead_rank_of_torchrun_is_reported(
    launch: Launch, script: Script, marker: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(script(SEGFAULT), nproc=2)
    text = str(caught.value)
    assert text.startswith("torchrun ended with exit status 1: rank 1 by SIGSEGV\n")
    assert "--- rank 0, stdout\nrank 0 is here\n" in text
    assert "the last words" in caught.value.result.rank_stderr[1]
    shown = capsys.readouterr()
    assert "[rank 0] rank 0 is here\n" in shown.out
    assert "[rank 1] the last words\n" in shown.err
    assert living_processes(marker) == []


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_a_dead_rank_of_mpirun_is_reported(
    launch: Launch, script: Script, marker: str, use_mpi: Callable[[str], None], flavour: str
) -> None:
    use_mpi(flavour)
    with pytest.raises(LaunchError, match=r"^mpirun ended with exit status (139 \(SIGSEGV in a rank\)|11)\n") as caught:
        launch(script(SEGFAULT), launcher="mpirun", nproc=2)
    assert "the last words" in str(caught.value)
    assert living_processes(marker) == []


@pytest.mark.long(except_for="python")
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.long), "python"])
def test_a_timeout_shows_the_stacks(launch: Launch, script: Script, marker: str, launcher: str) -> None:
    nproc = None if launcher == "python" else 2
    path = script(HANG)
    with pytest.raises(LaunchTimeout) as caught:
        launch(path, launcher=launcher, nproc=nproc, timeout=scaled(2 if launcher == "python" else 20))
    assert living_processes(marker) == []
    assert sorted(caught.value.stacks) == list(range(nproc or 1))
    for rank, stack in caught.value.stacks.items():
        assert f'File "{path}", line 6 in wait_for_ever' in stack
        assert stack in str(caught.value)
        assert f"rank {rank} waits" in caught.value.result.rank_stdout[rank]
    assert str(caught.value).startswith(f"{launcher} did not end within ")


def test_processes_that_a_script_leaves_are_killed(launch: Launch, script: Script, marker: str) -> None:
    result = launch(script(DETACHED_PROCESSES), launcher="python", timeout=60)
    assert result.stdout == "all are there\n"
    assert living_processes(marker) == []


def test_an_interrupted_launch_leaves_no_processes(launch: Launch, script: Script, marker: str) -> None:
    stop = threading.Event()
    path = script("import pathlib, time\npathlib.Path(__file__).with_name('waits').touch()\ntime.sleep(600)\n")

    def interrupt() -> None:
        while not stop.wait(0.05):
            if path.with_name("waits").exists():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(path, launcher="python", timeout=60)
    finally:
        stop.set()
        thread.join()
    assert living_processes(marker) == []


def test_missing_output_is_an_error_if_it_was_asked_for(launch: Launch, script: Script) -> None:
    path = script("pass")
    assert launch(path, launcher="python").stdout == ""
    with pytest.raises(NoOutput, match=r"^python succeeded, but no rank wrote anything \(output=True\)\n"):
        launch(path, launcher="python", output=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"launcher": "mpiexec"}, "launcher='mpiexec'.: allowed are torchrun, accelerate, deepspeed, mpirun, srun, py"),
        ({"nproc": 0}, r"nproc=0\): allowed is an int >= 1"),
        ({"nproc": "2"}, r"nproc='2'\): allowed is an int >= 1"),
        ({"launcher": "python", "nproc": 2}, r"nproc=2\): allowed is 1, since it starts one"),
        ({"timeout": 0}, r"timeout=0\): allowed is a time > 0 such as 300 \(seconds\), '90s'"),
        ({"timeout": "soon"}, r"timeout='soon'\): allowed is a time > 0"),
    ],
)
def test_invalid_arguments_are_errors(launch: Launch, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch("none.py", **arguments)  # type: ignore[arg-type]
    here = Path(__file__).parent
    with pytest.raises(FileNotFoundError, match=rf"no such file: {here}/none.py or {Path.cwd()}/none.py"):
        launch("none.py", launcher="python")
