"""A process that gets hardly any processor time, as on a busy machine; Linux only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Let the main thread of the process `pid` run only when nothing else does, beside processes that always run.

    It keeps the lowest priority afterwards.
    """
    processor = min(os.sched_getaffinity(0))
    command = [sys.executable, "-c", _SPIN, str(processor)]
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            spinning = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(spinning.kill)
            assert spinning.stdout is not None
            spinning.stdout.readline()
        os.sched_setaffinity(pid, {processor})
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))  # Only root may undo this.
        yield
