"""Readers of the kernel's files about devices, and about the CPUs and the memory that this process may use.

Files about devices are below a folder `root` that contains ``sys``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


def nodes(folder: Path, patterns: Sequence[str]) -> list[tuple[int, str]]:
    """Return the files in `folder` whose paths match one of `patterns`: the number in its first group, and the name."""
    found: list[tuple[int, str]] = []
    for pattern in patterns:
        inner, _, name = pattern.rpartition("/")
        matching = ((file, re.fullmatch(name, file.name, re.ASCII)) for file in (folder / inner).glob("*"))
        found += [(int(match[1]), file.name) for file, match in matching if match and not file.is_dir()]
    return sorted(found)


def class_folder(root: Path, name: str) -> Path:
    """Return the folder of the node `name` in any class of sysfs; if there is none, a path that does not exist."""
    return next(iter(sorted((root / "sys/class").glob(f"*/{name}"))), root / "sys/class" / name)


def pci_address(root: Path, name: str) -> str | None:
    """Return the PCI address of the device with the node `name`, or in the IOMMU group `name`; None if it has none."""
    for link in (class_folder(root, name) / "device", *(root / "sys/kernel/iommu_groups" / name).glob("devices/*")):
        address = link.resolve().name
        if _PCI.fullmatch(address):
            return address
    return None


def read_text(file: Path) -> str:
    """Return the stripped text of `file`; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(file: Path) -> int | None:
    """Return the integer in `file`, decimal or, with ``0x``, hexadecimal; None if there is none."""
    try:
        return int(read_text(file), 0)
    except ValueError:
        return None


def numa_node(root: Path, pci: str | None) -> int | None:
    """Return the NUMA node of a PCI address; None if sysfs has none, or -1, as on a machine without NUMA nodes."""
    node = None if pci is None else read_number(root / "sys/bus/pci/devices" / pci / "numa_node")
    return node if node is not None and node >= 0 else None


_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Names of the file with the memory limit of a cgroup, in v2 and in v1."""
_OOM_COUNTERS = ("memory.events", "memory.oom_control")
"""Names of the file with the counter of out-of-memory kills in a cgroup, in v2 and in v1."""


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


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of out-of-memory kills in this process's control group, or None if there is no counter.

    It is a line ``oom_kill N`` (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
    """
    for folder in cgroups(root, "memory"):
        for line in "\n".join(read_text(folder / name) for name in _OOM_COUNTERS).splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


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
