"""Tests of the kind `cpu`: slots made of the allowed CPUs, and cgroup quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.kernel_files import affinity, cpu_quota, usable_memory
from pytest_accel.hardware.vendors.cpu import Cpu, split


def _cpu(argument: str | None, root: Path = Path("/")) -> Cpu:
    return Cpu(KINDS["cpu"], argument, root)


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@given(st.lists(st.integers(0, 500), min_size=1, unique=True), st.integers(1, 600))
def test_slots_differ_by_one_cpu_at_most_and_share_cpus_only_if_there_are_too_few(cpus: list[int], slots: int) -> None:
    parts = split(cpus, slots)
    sizes = [len(part) for part in parts]
    assert len(parts) == slots
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assigned = [cpu for part in parts for cpu in part]
    assert set(assigned) == set(cpus)
    if slots <= len(cpus):
        assert assigned == cpus


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity on this system")
def test_slots_consist_of_the_cpus_in_the_affinity(tmp_path: Path) -> None:
    assert affinity() == tuple(sorted(os.sched_getaffinity(0)))
    (device,) = _cpu(None, tmp_path).discover()
    assert device == Device("cpu", "cpu-0", 0, "CPU", cores=affinity(), single_process=True)
    # There are as many slots as asked for, even with fewer CPUs.
    devices = _cpu(str(len(affinity()) + 2), tmp_path).discover()
    assert [device.id for device in devices] == [f"cpu-{index}" for index in range(len(affinity()) + 2)]
    assert devices[-2].cores == devices[0].cores


def test_a_quota_limits_the_cpus_but_leaves_at_least_one(tmp_path: Path) -> None:
    _write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert [device.cores for device in _cpu(None, tmp_path).discover()] == [affinity()[:1]]


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/slice/job\n",
                "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
                "sys/fs/cgroup/slice/cpu.max": "150000 50000\n",
                "sys/fs/cgroup/cpu.max": "400000 100000\n",
            },
            3.0,
        ),
        ({"proc/self/cgroup": "0::/../host\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_its_parents_is_used(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    _write(tmp_path, files)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/slice/job\n",
                "sys/fs/cgroup/slice/job/memory.max": "max\n",
                "sys/fs/cgroup/slice/memory.max": "4096\n",
                "sys/fs/cgroup/memory.max": "8192\n",
            },
            4096,
        ),
        ({"proc/self/cgroup": "4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n"}, 4096),
    ],
)
def test_the_smallest_limit_of_memory_of_a_cgroup_and_its_parents_is_used(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    _write(tmp_path, files)
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_memory(tmp_path) == (present if limit is None else min(present, limit))


def test_the_mask_is_the_number_of_threads_unless_it_is_already_set() -> None:
    slots = [Device("cpu", f"cpu-{n}", n, "CPU", cores=cores) for n, cores in enumerate([(0, 1), (2, 3), (3,)])]
    vendor = _cpu("3")
    assert vendor.mask(slots, {}) == {"OMP_NUM_THREADS": "4"}
    assert vendor.mask(slots, {"OMP_NUM_THREADS": "1"}) == {}
    assert vendor.mask([], {}) == {}
    assert vendor.visible(slots, {"CUDA_VISIBLE_DEVICES": ""}) == vendor.fastest(slots) == tuple(slots)
    assert vendor.torch_devices(slots[:2]) == ("cpu", "cpu")
    vendor.verify(slots, {})
