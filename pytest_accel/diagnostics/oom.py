"""Whether the kernel has killed for want of memory: its counter in the control group that ranks and driver are in.

Version 2 has it in ``memory.events``, version 1 in ``memory.oom_control``, both as a line ``oom_kill N`` (the kernel's
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
"""

from __future__ import annotations

import signal
from pathlib import Path

from pytest_accel.diagnostics.exit_status import describe_exit

NOTE = "out of memory (the oom_kill counter of the control group went up)"


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this process's control group the kernel has killed for want of memory.

    None where there is no such counter. `root` is where the file system begins.
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
        # In a container the path may be the host's, and the group is mounted at the top.
        for inner in dict.fromkeys((path.strip("/"), "")):
            if not controllers:
                found.append(root / "sys/fs/cgroup" / inner / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(root / "sys/fs/cgroup/memory" / inner / "memory.oom_control")
    return found


def describe_death(status: int, before: int | None, after: int | None) -> str:
    """As `describe_exit`, and that it was for want of memory.

    There is one counter for all: of two ranks that are killed at one time, only one may be told to be.
    """
    text = describe_exit(status)
    return f"{text}: {NOTE}" if killed_for_memory(status, before, after) else text


def killed_for_memory(status: int, before: int | None, after: int | None) -> bool:
    """Whether an exit `status` is such a kill: by SIGKILL, while the counter went up."""
    return status == -signal.SIGKILL and before is not None and after is not None and after > before
