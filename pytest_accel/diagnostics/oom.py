"""Detection of out-of-memory kills, by the kernel's counter for the control group of the ranks and the driver.

Control groups of version 2 have the counter in ``memory.events``, groups of version 1 in ``memory.oom_control``, as
a line ``oom_kill N`` (the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
"""

from __future__ import annotations

import signal
from pathlib import Path

from pytest_accel.hardware.kernel_files import cgroups, read_text
from pytest_accel.messages.rank_exit import ExitCause, RankExit, exited

_COUNTERS = ("memory.events", "memory.oom_control")


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of out-of-memory kills in this process's control group, or None if there is no counter.

    `root` is the root of the file system.
    """
    for folder in cgroups(root, "memory"):
        for line in "\n".join(read_text(folder / name) for name in _COUNTERS).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def with_oom_cause(end: RankExit, before: int | None, after: int | None) -> RankExit:
    """Return the `end` of a rank: with the cause "out of memory" if it was SIGKILL and the counter went up meanwhile.

    All ranks share one counter: of two ranks that are killed at the same time, possibly only one gets the cause.
    """
    killed = end == exited(-signal.SIGKILL) and before is not None and after is not None and after > before
    return RankExit(ExitCause.OUT_OF_MEMORY, end.status) if killed else end
