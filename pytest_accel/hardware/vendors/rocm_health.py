"""Facts from which the health of an AMD GPU is judged, from the files of the kernel's drivers.

``/sys/class/kfd/kfd/proc/PID/vram_GPUID`` has the bytes of a GPU's memory that a process uses (kernel:
``amdkfd/kfd_process.c``). ``ras/umc_err_count`` of its PCI device counts memory errors (``amdgpu_ras.c``: a line
``ue: N`` for uncorrectable ones). ``mem_info_vram_total`` and ``_used`` are in bytes. Whether a container sees the
processes of others, and under which pids, is unverified. This module has not been tested on an AMD GPU.
"""

from __future__ import annotations

import re
from pathlib import Path

from pytest_accel.hardware.health import Facts, Process
from pytest_accel.hardware.sysfs import read_number, read_text

_UNCORRECTED = re.compile(r"^ue: ([0-9]+)$", re.MULTILINE | re.ASCII)


def condition(root: Path, pci: str | None) -> Facts:
    """Return the facts about the GPU at the address `pci`, without its processes; `root` contains ``sys``."""
    folder = root / "sys/bus/pci/devices" / (pci or "none")
    errors = _UNCORRECTED.search(read_text(folder / "ras/umc_err_count"))
    total, used = read_number(folder / "mem_info_vram_total"), read_number(folder / "mem_info_vram_used")
    return Facts(
        ecc_errors=int(errors[1]) if errors else 0,
        memory_used=used,
        memory_free=total - used if total is not None and used is not None else None,
    )


def processes(root: Path, gpu: int) -> tuple[Process, ...]:
    """Return the processes that use memory of the GPU with the ``gpu_id`` `gpu`."""
    found = (
        (int(folder.name), read_number(folder / f"vram_{gpu}"))
        for folder in (root / "sys/class/kfd/kfd/proc").glob("*")
        if folder.name.isdecimal()
    )
    return tuple(Process(pid, used) for pid, used in sorted(found) if used)
