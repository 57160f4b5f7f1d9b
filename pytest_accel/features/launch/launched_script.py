"""A launched script: its process with all descendants, its result, and the errors for a launch that failed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.processes import KILL_TIMEOUT, living
from pytest_accel.core.signals import signal_name
from pytest_accel.features.launch import reaper

LAUNCHER = "launcher"
"""Name of the files ``launcher.out`` and ``launcher.err``; for the files of ranks see `rank_program`."""
_LINES, _STACK_LINES = 20, 200  # maximum number of lines of each stream in an error's text, and of stacks at its end
_TORCHRUN_WORKER = re.compile(r"\brank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+)")  # In the summary of its agent.
_FATAL = "Fatal Python error: "
"""Python's fault handler writes this before the stacks of all threads, and what C++ has to say is before it."""


@dataclass(frozen=True)
class LaunchResult:
    """The result of a launch that has ended."""

    command: tuple[str, ...]
    """The command line of the launcher."""
    returncode: int
    """The launcher's exit status, or the negated number of the signal that terminated it."""
    stdout: str
    """The output of the ranks, in order of rank, and then of the launcher itself."""
    stderr: str
    rank_stdout: Mapping[int, str]
    """The output of each rank."""
    rank_stderr: Mapping[int, str]
    folder: Path
    """The folder with the files of all output."""

    @classmethod
    def read(cls, command: tuple[str, ...], returncode: int, folder: Path) -> LaunchResult:
        """Return the result, with the output from the files in `folder`."""
        files = [(name, end, path.read_text(encoding="utf-8", errors="replace")) for name, end, path in outputs(folder)]
        out, err = ({name: text for name, end, text in files if end == stream} for stream in ("out", "err"))
        rank_out, rank_err = ({int(name): text for name, text in of.items() if name != LAUNCHER} for of in (out, err))
        return cls(command, returncode, "".join(out.values()), "".join(err.values()), rank_out, rank_err, folder)


def outputs(folder: Path) -> list[tuple[str, str, Path]]:
    """Return name, stream and path of each file with output: first of the ranks in order, then of the launcher."""
    ranks = sorted((path.stem for path in folder.glob("*.err") if path.stem.isdecimal()), key=int)
    return [(name, end, folder / f"{name}.{end}") for name in (*ranks, LAUNCHER) for end in ("out", "err")]


class LaunchError(Exception):
    """A launched script failed; the message has its last output and the command line."""

    __module__ = "pytest_accel"  # The public name, which fits into the line of the short summary.

    def __init__(self, text: str, result: LaunchResult) -> None:
        super().__init__(_report(text, result))
        self.result = result
        """The result up to the failure."""


class LaunchTimeout(LaunchError):
    """A launched script timed out; its ranks have written their stacks, and all its processes were killed."""

    __module__ = "pytest_accel"


def describe_exits(result: LaunchResult) -> str:
    """Return how the launcher has ended, and under torchrun the rank that its agent names last, as the root cause."""
    causes = (f"rank {rank} {_status(int(code))}" for rank, code in _TORCHRUN_WORKER.findall(result.stderr)[-1:])
    return ": ".join((_status(result.returncode), *causes))


def _status(code: int) -> str:
    return f"by {signal_name(-code)}" if code < 0 else f"with exit status {code}"


def _report(text: str, result: LaunchResult) -> str:
    """Return `text` with the command line, and the last output of each rank and of the launcher, with all stacks."""
    parts = [text, f"command: {shlex.join(result.command)}", f"files: {result.folder}"]
    for name, stream, path in outputs(result.folder):
        lines = path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        fatal = (at for at, line in enumerate(lines) if line.startswith(_FATAL) and at > len(lines) - _STACK_LINES)
        if shown := lines[max(0, max(fatal, default=len(lines)) - _LINES) :]:
            more = f" (the last {len(shown)} lines of {len(lines)})" if len(shown) < len(lines) else ""
            who = "the launcher" if name == LAUNCHER else f"rank {name}"
            parts += [f"--- {who}, std{stream}{more}", *shown]
    return "\n".join(parts)


_POLL_INTERVAL = 0.1  # seconds between two checks for new output
_STACK_TIMEOUT = 10.0  # seconds for the ranks to write their stacks


def run(command: tuple[str, ...], environ: Mapping[str, str], folder: Path, timeout: float) -> tuple[int, bool]:
    """Run `command`, show its output, and return its exit status, and whether it has ended within `timeout`.

    No process of `command` is left then, whether this function returns or raises.
    """
    status, packages = folder / "status", os.path.dirname(os.path.dirname(psutil.__file__))
    program = [sys.executable, "-I", "-S", reaper.__file__, packages, str(status), *command]
    with open(folder / f"{LAUNCHER}.out", "wb") as stdout, open(folder / f"{LAUNCHER}.err", "wb") as stderr:
        # The reaper must outlive a kill of the test's process group, to kill the launch's processes.
        process = subprocess.Popen(
            program, env=environ, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True
        )
    assert process.stdin is not None
    shown: dict[Path, int] = {}
    deadline = monotonic() + timeout
    try:
        while in_time := monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                process.wait(min(_POLL_INTERVAL, deadline - monotonic()))
                break
            _show(shown, folder)
        if not in_time:
            _write_stacks(process.pid, folder)
    finally:
        process.stdin.close()  # The reaper kills all other processes, and exits.
        process.wait(2 * KILL_TIMEOUT)
    _show(shown, folder)
    return int(status.read_bytes()) if status.exists() else process.returncode, in_time


def _write_stacks(reaper_pid: int, folder: Path) -> None:
    """Have the ranks write their stacks, and wait until they have ended."""
    ranks = {int(path.read_bytes() or 0) for path in folder.glob("*.pid")}
    processes = psutil.Process(reaper_pid).children(recursive=True)
    # Stop the others first: when a launcher sees one rank end, it terminates ranks that have not written their stacks.
    for process in sorted(processes, key=lambda one: one.pid in ranks):
        with suppress(psutil.Error):
            process.send_signal(signal.SIGABRT if process.pid in ranks else signal.SIGSTOP)
    deadline = monotonic() + _STACK_TIMEOUT
    while monotonic() < deadline and any(one.pid in ranks for one in living(processes)):
        sleep(0.02)


def _show(shown: dict[Path, int], folder: Path) -> None:
    """Show the new lines of all output, with the rank of each; `shown` has the bytes shown of each file."""
    for name, stream, path in outputs(folder):
        with open(path, "rb") as file:
            file.seek(shown.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        shown[path] = shown.get(path, 0) + len(whole)
        prefix = "" if name == LAUNCHER else f"[rank {name}] "
        for line in whole.decode(errors="replace").splitlines():
            print(f"{prefix}{line}", file=sys.stdout if stream == "out" else sys.stderr, flush=True)
