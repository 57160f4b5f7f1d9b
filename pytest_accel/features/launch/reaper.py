"""A program that runs one command and leaves no process of it behind.

It is started as ``python -I -S reaper.py CONTROL STATUS COMMAND...``, and imports only the standard library, so that it
starts in a few milliseconds. It is the subreaper of all descendants of the command (prctl(2), PR_SET_CHILD_SUBREAPER):
none can escape by starting its own session, as torchrun's workers do. It kills all descendants when the command has
ended, when data is written to the pipe CONTROL, or when CONTROL is closed, which also happens when the process at its
other end dies. Then it writes the command's exit status to the pipe STATUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from time import monotonic

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
_NOT_STARTED = 127
_KILL_TIMEOUT = 10.0
"""Seconds in which the descendants must exit. A process of another user may be one that this program cannot kill."""


def main(arguments: Sequence[str]) -> None:
    """Run the command in `arguments`, after the two descriptors. This program's own exit status has no meaning."""
    control, status = int(arguments[0]), int(arguments[1])
    os.set_inheritable(control, False)
    os.set_inheritable(status, False)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    libc = ctypes.CDLL(None) if _LINUX else None
    if libc is not None:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = _start(arguments[2:], libc)
    ended: dict[int, int] = {}
    while command not in ended:
        ready, _, _ = select.select([control, wake_read], [], [])
        if control in ready:
            break
        _drain(wake_read)
        ended |= _reap()
    deadline = monotonic() + _KILL_TIMEOUT
    while living := [pid for pid in _descendants(os.getpid()) if pid not in ended]:
        if monotonic() > deadline:
            print(f"processes that cannot be killed: {', '.join(map(str, living))}", file=sys.stderr, flush=True)
            break
        for pid in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        select.select([wake_read], [], [], 0.05)
        _drain(wake_read)
        ended |= _reap()
    ended |= _reap()
    with contextlib.suppress(BrokenPipeError):
        os.write(status, str(ended.get(command, -signal.SIGKILL)).encode())


def _start(command: Sequence[str], libc: ctypes.CDLL | None) -> int:
    """Start the command, which is killed if this program dies; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"{command[0]} could not be started: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(_NOT_STARTED)


def _reap() -> dict[int, int]:
    """Reap all child processes that have ended; return the exit status, or negated signal, of each by process id."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 4096)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _processes() -> Iterator[tuple[int, int]]:
    """Yield process id and parent id of every process; on Linux without zombies."""
    if not _LINUX:
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, encoding="utf-8", check=False
        )
        for line in listed.stdout.splitlines():
            pid, parent, name = line.split(None, 2)
            if not (int(parent) == os.getpid() and name.endswith("ps")):
                yield int(pid), int(parent)
        return
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                # The name before the state, in parentheses, may contain any character (proc_pid_stat(5)).
                state, above = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    yield int(name), int(above)


if __name__ == "__main__":
    main(sys.argv[1:])
    os._exit(0)  # Skip the finalization of the interpreter, which takes longer than the rest of the program.
