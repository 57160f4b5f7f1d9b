"""Tests of exit statuses, of the tail of a log, and of stacks taken from a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_accel.core.rank_exit import ExitCause, RankExit, exited
from pytest_accel.core.signals import STACK_SIGNAL
from pytest_accel.diagnostics.log_end import tail
from pytest_accel.diagnostics.python_stacks import take_stacks

Start = Callable[[Path, str], "subprocess.Popen[str]"]

ANSWERS = """
import faulthandler, sys
stacks = open(sys.argv[1], "a")
faulthandler.register(int(sys.argv[2]), file=stacks, all_threads=True)
"""
WAITS = """
def wait_for_ever():
    print("ready", flush=True)
    sys.stdin.read()
wait_for_ever()
"""
HOLDS_THE_GIL = """
import ctypes, os
def sit_in_native_code():
    print("ready", flush=True)
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
sit_in_native_code()
"""
IGNORES = """
import signal, sys
signal.signal(int(sys.argv[2]), signal.SIG_IGN)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Provide a function that starts a program and waits until it is ready.

    The program's arguments are the path of the file for its stacks and the number of the signal.
    """
    started: list[subprocess.Popen[str]] = []

    def run(stacks: Path, code: str) -> subprocess.Popen[str]:
        stacks.touch()
        process = subprocess.Popen(
            [sys.executable, "-c", code, stacks, str(STACK_SIGNAL)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("status", "crash"), [(-signal.SIGSEGV, True), (-signal.SIGKILL, False), (11, False)])
def test_a_crash_is_an_exit_by_a_signal_of_the_fault_handler(status: int, crash: bool) -> None:
    assert exited(status).is_crash is crash
    assert not RankExit(ExitCause.MACHINE_LOST).is_crash


def test_tail_returns_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(str(log)) == ""
    log.write_bytes(b"\n".join([b"first", b"caf\xff", b"last", b"", b""]))
    assert tail(str(log)) == "first\ncaf\N{REPLACEMENT CHARACTER}\nlast"
    assert tail(str(log), 7) == "last"
    assert tail(str(tmp_path)) == ""


def test_tail_reads_only_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(bytes(1 << 20) + b"\nlast\n")
    tracemalloc.start()
    try:
        assert tail(str(log), 6) == "last"
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("program", "function"), [(WAITS, "wait_for_ever"), (HOLDS_THE_GIL, "sit_in_native_code")])
def test_the_stack_of_a_process_is_taken_repeatedly(start: Start, tmp_path: Path, program: str, function: str) -> None:
    path = tmp_path / "stacks"
    process = start(path, ANSWERS + program)
    for _ in range(2):  # The second result does not contain the first stack.
        stack = take_stacks({0: process.pid}, {0: str(path)}, STACK_SIGNAL, timeout=60)[0]
        assert stack.count(f"in {function}\n") == 1
        assert stack.endswith("in <module>")
    assert process.poll() is None


def test_a_process_that_ignores_the_signal_or_is_dead_has_no_stack(start: Start, tmp_path: Path) -> None:
    names = ("answers", "ignores", "gone")
    paths = {rank: tmp_path / name for rank, name in enumerate(names)}
    processes = [
        start(paths[0], ANSWERS + WAITS),
        start(paths[1], IGNORES + WAITS),
        start(paths[2], ANSWERS + WAITS),
    ]
    processes[2].kill()
    processes[2].wait()
    stacks = take_stacks(
        {rank: process.pid for rank, process in enumerate(processes)},
        {rank: str(path) for rank, path in paths.items()},
        STACK_SIGNAL,
        timeout=4,
    )
    assert {names[rank]: "wait_for_ever" in stack for rank, stack in stacks.items()} == {
        "answers": True,
        "ignores": False,
        "gone": False,
    }
    assert stacks[1] == stacks[2] == ""
