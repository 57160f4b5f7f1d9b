"""The CPUs and the memory of the machine that this process may use, by its affinity and its cgroup."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from pytest_accel.hardware.sysfs import read_text

_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Names of the file with the memory limit of a cgroup, in v2 and in v1."""


def affinity() -> tuple[int, ...]:
    """Return the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_slots() -> int:
    """Return how many ranks may run on the CPU at once: the allowed cores, by affinity and cgroup quota."""
    quota = cpu_quota(Path("/"))
    cores = len(affinity())
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cpu_quota(root: Path) -> float | None:
    """Return the cgroup's quota of CPU time, in CPUs: the lowest of the cgroup and its parents; None if unlimited.

    Neither the affinity nor `os.cpu_count` considers it. cgroup v2: ``cpu.max``; v1: ``cpu.cfs_quota_us`` and
    ``cpu.cfs_period_us``.
    """
    found = map(_quota, cgroups(root, "cpu"))
    return min((quota for quota in found if quota is not None), default=None)


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of the machine's memory, or the lowest limit of the cgroup and its parents if that is less."""
    limits = [read_text(folder / name) for folder in cgroups(root, "memory") for name in _MEMORY_LIMITS]
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([present, *(int(limit) for limit in limits if limit.isdecimal())])


def cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of each cgroup in which `controller` limits this process, and of its parents."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        if not mount.exists():
            mount = root / "sys/fs/cgroup" / controller
        # In a container the path may be the host's. Only its end, or no part of it, exists under the mount.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == mount:
                break


def _quota(folder: Path) -> float | None:
    quota, _, period = read_text(folder / "cpu.max").partition(" ")
    if not period:
        quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    # Without a limit, v2 has "max", v1 has -1.
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
