"""The process of a launch: start it, show its output, and terminate it with all its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import sleep

import psutil

from pytest_accel.core.clock import monotonic
from pytest_accel.core.processes import KILL_TIMEOUT, living
from pytest_accel.features.launch import reaper
from pytest_accel.features.launch.launch_result import LAUNCHER, outputs

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
