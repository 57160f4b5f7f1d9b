"""The CPU as a kind of device: each device is a set of logical CPUs that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS, KindFacts
from pytest_accel.core.units import is_count
from pytest_accel.hardware.sysfs import read_text
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_THREADS = "OMP_NUM_THREADS"
_MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Files with the limit of a cgroup: v2, v1."""


class Cpu(BaseVendor):
    """The vendor of kind ``cpu``.

    The allowed CPUs are divided into `slots` parts whose sizes differ by one at most; if there are fewer CPUs than
    slots, slots share CPUs. If `slots` is None, each NUMA node is a slot.
    """

    facts = KINDS["cpu"]

    def __init__(self, slots: int | None = None, root: Path = Path("/")) -> None:
        super().__init__(root)
        self._slots = slots

    @classmethod
    def make(cls, facts: KindFacts, argument: str | None) -> Cpu:
        """Return the vendor for ``--accel cpu`` and ``--accel cpu:N``. Raise ValueError unless N is a number from 1."""
        if argument is not None and not is_count(argument):
            raise ValueError(f"--accel cpu:{argument}: allowed are cpu and cpu:N, with N from 1")
        return cls(None if argument is None else int(argument))

    def discover(self) -> tuple[Device, ...]:
        """Return the slots: parts of this process's CPU affinity, in total no more CPUs than the cgroup's CPU quota."""
        allowed = affinity()
        quota = cpu_quota(self._root)
        if quota is not None:
            # A quota limits CPU time, not the set of CPUs, so any CPUs of this number will do.
            allowed = allowed[: max(1, int(quota))]
        nodes = numa_nodes(self._root)
        if self._slots is not None:
            parts = split(allowed, self._slots)
        else:
            parts = [tuple(cpu for cpu in allowed if cpu in node) for node in nodes.values()]
            parts = [part for part in parts if part] or [allowed]
        return tuple(
            Device(
                kind=self.kind,
                id=f"cpu-{index}",
                index=index,
                name="CPU",
                numa=next((node for node, cpus in nodes.items() if set(part) <= set(cpus)), None),
                cores=part,
                # Ranks are pinned to the cores of a slot. For smaller parts, users ask for more slots.
                single_process=True,
            )
            for index, part in enumerate(parts)
        )

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return `devices` unchanged: all CPUs are assumed to be equally fast."""
        return tuple(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Set ``OMP_NUM_THREADS`` to the number of CPUs of `devices`, unless `environ` has it.

        Without it, each rank would start a thread for every CPU.
        """
        cores = {core for device in devices for core in device.cores}
        return {_THREADS: str(len(cores))} if cores and _THREADS not in environ else {}

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Do nothing: no variable hides a CPU."""


make = Cpu.make


def threads_beside_ccl(cores: int, environ: Mapping[str, str]) -> int:
    """Return how many of `cores` remain for computation beside oneCCL's worker threads; at least 1.

    ``CCL_WORKER_COUNT`` (default 1) threads each keep a core busy (oneCCL environment variables, "Workers").
    """
    workers = environ.get("CCL_WORKER_COUNT", "1")
    return max(1, cores - (int(workers) if workers.isdecimal() else 1))


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


def split(cpus: Sequence[int], slots: int) -> list[tuple[int, ...]]:
    """Divide `cpus` into `slots` contiguous parts whose lengths differ by one at most.

    If there are fewer CPUs than slots, each slot is a single CPU, in rotation.
    """
    if slots > len(cpus):
        return [(cpus[slot % len(cpus)],) for slot in range(slots)]
    cuts = [len(cpus) * slot // slots for slot in range(slots + 1)]
    return [tuple(cpus[start:end]) for start, end in pairwise(cuts)]


def numa_nodes(root: Path) -> dict[int, tuple[int, ...]]:
    """Return the logical CPUs of each NUMA node that has CPUs, from sysfs; empty if sysfs lists no nodes."""
    nodes: dict[int, tuple[int, ...]] = {}
    for file in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        cpus = parse_cpulist(file.read_text(encoding="utf-8"))
        if cpus:
            nodes[int(file.parent.name.removeprefix("node"))] = cpus
    return dict(sorted(nodes.items()))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format: ``0-3,8`` is 0, 1, 2, 3, 8."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def cpu_quota(root: Path) -> float | None:
    """Return the cgroup's quota of CPU time, in CPUs: the lowest of the cgroup and its parents; None if unlimited.

    Neither the affinity nor `os.cpu_count` considers it. cgroup v2: ``cpu.max``; v1: ``cpu.cfs_quota_us`` and
    ``cpu.cfs_period_us``.
    """
    found = (_quota_v2(folder) or _quota_v1(folder) for folder in _cgroups(root, "cpu"))
    return min((quota for quota in found if quota is not None), default=None)


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of the machine's memory, or the lowest limit of the cgroup and its parents if that is less."""
    limits = [read_text(folder / name) for folder in _cgroups(root, "memory") for name in _MEMORY_LIMITS]
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([present, *(int(limit) for limit in limits if limit.isdecimal())])


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of each cgroup in which `controller` limits this process, and of its parents."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        if not mount.exists():
            mount = root / "sys/fs/cgroup" / controller
        # In a container the path may be that of the host. Only its end, or nothing of it, exists under the mount.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            yield folder
            if folder == mount:
                break


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    except OSError:
        return None
    return None if quota < 0 else quota / period
