"""Detection of out-of-memory kills, by the kernel's counter for the control group of the ranks and the driver.

Control groups of version 2 have the counter in ``memory.events``, those of version 1 in ``memory.oom_control``, both as
a line ``oom_kill N`` (the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
"""

from __future__ import annotations

import signal
from pathlib import Path

from pytest_accel.messages.rank_exit import ExitCause, RankExit, exited


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of out-of-memory kills in this process's control group, or None if there is no counter.

    `root` is the root of the file system.
    """
    for path in _counters(root):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if counts and counts[0].isdecimal():
            return int(counts[0])
    return None


def _counters(root: Path) -> list[Path]:
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        # In a container the path may be the one on the host, while the group is mounted at the top.
        for inner in dict.fromkeys((path.strip("/"), "")):
            if not controllers:
                found.append(root / "sys/fs/cgroup" / inner / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(root / "sys/fs/cgroup/memory" / inner / "memory.oom_control")
    return found


def with_oom_cause(end: RankExit, before: int | None, after: int | None) -> RankExit:
    """Return the `end` of a rank: with the cause "out of memory" if it was SIGKILL and the counter went up meanwhile.

    All ranks share one counter: of two ranks that are killed at the same time, possibly only one gets the cause.
    """
    killed = end == exited(-signal.SIGKILL) and before is not None and after is not None and after > before
    return RankExit(ExitCause.OUT_OF_MEMORY, end.status) if killed else end
