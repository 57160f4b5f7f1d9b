"""Tests of launched scripts that fail: the error, and that no process is left."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from pytest_accel import LaunchError, LaunchTimeout, NoOutput
from pytest_accel.features.launch.launch_result import failed, result_of, timed_out
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


def test_a_signal_is_reported_by_its_name(launch: Launch, script: Script) -> None:
    with pytest.raises(LaunchError, match=r"^python ended by SIGSEGV\n") as caught:
        launch(script(SEGFAULT), launcher="python")
    assert "the last words" in str(caught.value)
    assert "ctypes/__init__.py" in str(caught.value), "the stack of a dead rank must be shown"


@pytest.mark.skipif(sys.platform != "linux", reason="needs libstdc++")
def test_an_abort_at_the_exit_of_a_script_is_explained(launch: Launch, script: Script) -> None:
    """The threads of a process group abort the process in the same way if they run when Python exits."""
    with pytest.raises(LaunchError, match=r"^python ended by SIGABRT\nrank 0: aborted at the exit") as caught:
        launch(script(TERMINATE_AT_EXIT), launcher="python")
    assert "import torch.distributed.nn before init_process_group" in str(caught.value)
    assert "--- rank 0, stdout\nall work is done\n" in str(caught.value)
    assert "terminate called without an active exception" in caught.value.result.stderr


def test_the_c_plus_plus_exception_that_aborts_ranks_is_named(tmp_path: Path) -> None:
    thrown = "terminate called after throwing an instance of "
    stack = 'Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File "train.py", line 3 in main\n'
    written = {
        0: f"{thrown}'c10::Error'\n  what():  CUDA error: an illegal access\nException raised from f\n{stack}",
        1: f"{thrown}'c10::Error'\n  what():  CUDA error: an illegal access\n",
        2: f"{thrown}'int'\n{stack}",
        3: f"terminate called without an active exception\n{stack}",
        4: f"terminated called by nobody\n{stack}",
    }
    text = str(failed("python", result_of((), -6, dict.fromkeys(written, ""), written, ("", ""), tmp_path)))
    assert text.partition("\ncommand: ")[0].splitlines() == [
        "python ended by SIGABRT",
        "ranks 0-1: nothing caught a C++ exception: c10::Error: CUDA error: an illegal access",
        "rank 2: nothing caught a C++ exception: int",
    ]


@pytest.mark.long
def test_a_dead_rank_of_torchrun_is_reported(launch: Launch, script: Script, marker: str) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(script(SEGFAULT), nproc=2)
    text = str(caught.value)
    assert text.startswith("torchrun ended with exit status 1: rank 1 by SIGSEGV\n")
    assert "--- rank 0, stdout\nrank 0 is here\n" in text
    assert "the last words" in caught.value.result.rank_stderr[1]
    assert living_processes(marker) == []


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["openmpi", "mpich"])
def test_a_dead_rank_of_mpirun_is_reported(
    launch: Launch, script: Script, marker: str, use_mpi: Callable[[str], None], flavour: str
) -> None:
    use_mpi(flavour)
    with pytest.raises(LaunchError, match=r"^mpirun ended with exit status (139|11) \(SIGSEGV in a rank\)\n") as caught:
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
        assert f"--- rank {rank}, stacks\n" in str(caught.value)
        assert f"rank {rank} waits" in caught.value.result.rank_stdout[rank]
    assert str(caught.value).startswith(f"{launcher} did not end within ")


def test_output_before_the_stacks_of_a_timeout_is_shown_whole(tmp_path: Path) -> None:
    aborted = "Fatal Python error: Aborted\n\n"
    before = f"{aborted}the stack of a child process\nafter it\n"
    written = f"{before}{aborted}the stack of the rank\n"
    error = timed_out("python", result_of((), -6, {0: ""}, {0: written}, ("", ""), tmp_path), 1, 1)
    assert dict(error.stacks) == {0: "the stack of the rank"}
    assert str(error).endswith(f"--- rank 0, stderr\n{before}--- rank 0, stacks\nthe stack of the rank")


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


def test_a_killed_supervisor_ends_the_launch(launch: Launch, script: Script, marker: str) -> None:
    path = script("import os, time\nprint('here', flush=True)\nos.kill(os.getppid(), 9)\ntime.sleep(600)\n")
    text = "python: the process that supervises the launch has ended without a result"
    with pytest.raises(LaunchError, match=text) as caught:
        launch(path, launcher="python")
    assert caught.value.result.stdout == "here\n"
    psutil.wait_procs(living_processes(marker), timeout=60)
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
        ({"nproc": True}, r"nproc=True\): allowed is an int >= 1"),
        ({"nproc": "2"}, r"nproc='2'\): allowed is an int >= 1"),
        ({"launcher": "python", "nproc": 2}, r"nproc=2\): it starts one process; allowed is 1"),
        ({"timeout": 0}, r"timeout=0\): allowed is a time > 0 such as 300 \(seconds\), '90s'"),
        ({"timeout": "soon"}, r"timeout='soon'\): allowed is a time > 0"),
    ],
)
def test_invalid_arguments_are_errors(
    launch: Launch, script: Script, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        launch(script("pass"), **arguments)  # type: ignore[arg-type]


def test_a_missing_script_is_an_error(launch: Launch) -> None:
    here = Path(__file__).parent
    with pytest.raises(FileNotFoundError, match=rf"no such file: {here}/none.py or {Path.cwd()}/none.py"):
        launch("none.py", launcher="python")
