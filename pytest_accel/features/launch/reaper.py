"""A program that runs one command and leaves no process of it behind, even if the process of the test is killed.

It is the subreaper of all descendants of the command (prctl(2)): none can escape by starting its own session, as
torchrun's workers do. It kills them when the command has ended, or when standard input is closed, which also happens
when the test's process dies. Then it writes the command's exit status to the file STATUS.

It is started as ``python -I -S reaper.py PACKAGES STATUS COMMAND...`` and imports only the standard library and
`psutil`, from the folder PACKAGES, because an import of pytest takes longer than many a script.
"""

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from time import monotonic

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TIMEOUT = 10.0  # seconds in which killed processes must exit: less than the test's process waits for this program


def main(packages: str, status: str, *command: str) -> None:
    """Run `command`."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *arguments: None
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    )
    over: queue.SimpleQueue[object] = queue.SimpleQueue()
    for wait in (process.wait, sys.stdin.read):
        threading.Thread(target=lambda wait=wait: over.put(wait()), daemon=True).start()
    over.get()
    code = process.poll()
    sys.path.append(packages)
    if living := _kill_descendants():
        print(f"processes that cannot be killed: {', '.join(map(str, living))}", file=sys.stderr)
    with open(status, "w", encoding="ascii") as file:
        file.write(str(-signal.SIGKILL if code is None else code))


def _kill_descendants() -> list[int]:
    """Kill and reap all descendants of this program; return the process ids of the survivors after `_TIMEOUT`."""
    import psutil

    deadline = monotonic() + _TIMEOUT
    while (found := psutil.Process().children(recursive=True)) and monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):  # For example another user's, by sudo.
                process.kill()
        psutil.wait_procs(found, timeout=0.1)  # Children that have exited are reaped.
    return [process.pid for process in found]


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # Skip the finalization of the interpreter, which takes longer than the rest of the program.
