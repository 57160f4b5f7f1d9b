"""Time to discover eight NVIDIA GPUs with the driver that the tests build, which answers immediately."""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.measure import Effort, Figure, middle
from tests import fake_driver

_GPUS = 8
_PROCESSES = 5
"""Runs of one figure."""

# The time includes the import of the bindings, but not of what a session has imported before it looks for devices.
_CODE = """
import json, sys, time
import pytest, pytest_accel.plugin
from pytest_accel.hardware.registry import make_vendor
moments = [time.perf_counter()]
for vendor in (make_vendor("cuda"), make_vendor("cuda")):
    devices = vendor.discover()
    moments.append(time.perf_counter())
assert len(devices) == GPUS and all(len(device.links) >= 3 for device in devices)
with open("/proc/self/maps") as maps:
    started = "torch" in sys.modules or "libcuda.so" in maps.read()
print(json.dumps([(moments[1] - moments[0]) * 1e3, (moments[2] - moments[1]) * 1e3, started]))
"""


def _machine(*more: str) -> list[str]:
    """Return GPUs that report all their properties, four on each PCIe switch; `more` are further properties of each."""
    facts: list[str] = []
    for number in range(_GPUS):
        facts += [f"gpu GPU-{number}0000000-0000-0000-0000-000000000000", "name NVIDIA H100 80GB HBM3"]
        facts += [f"memory {80 * 2**30} {80 * 2**30}", "capability 9 0", "speed 16896 1980", "compute 0"]
        facts += [f"pci 0 {number + 1:x} 0", "ecc 0 0", "retiring 0", "remapped 0 0", *more]
        facts += [f"ancestor {other} {10 if other // 4 == number // 4 else 50}" for other in range(number)]
    return facts


def figures(folder: Path, effort: Effort) -> list[Figure]:
    """Return the times of a first and a second discovery in new processes, with an NVSwitch and with PCIe alone."""
    if fake_driver.compiler() is None:
        return [Figure("discovery", math.nan, "ms", note="needs Linux and a C compiler for the tests' driver")]
    folder.mkdir()
    driver = folder / "driver"
    fake_driver.build(driver / fake_driver.NVML, "libnvidia-ml.c")
    code = _CODE.replace("GPUS", str(_GPUS))
    found: list[Figure] = []
    loaded = 0
    for what, facts in (
        ("on an NVSwitch", _machine(*(f"nvlink {number}" for number in range(_GPUS)))),
        ("with PCIe alone", _machine()),
    ):
        # Allow the processes to write bytecode, else each would compile the modules.
        runs = [
            fake_driver.run(driver, folder / "machine.txt", code, *facts, PYTHONDONTWRITEBYTECODE="")
            for _ in range(effort.runs * _PROCESSES + 1)
        ][1:]
        first, again = (tuple(run[at] for run in runs) for at in (0, 1))
        found.append(
            Figure(f"{_GPUS} GPUs {what}, with the bindings' import", middle(first), "ms", 50.0, "50 ms", first)
        )
        found.append(Figure(f"{_GPUS} GPUs {what}, second discovery", middle(again), "ms", values=again))
        loaded += sum(run[2] for run in runs)
    return [*found, Figure("processes in which torch or CUDA was loaded", loaded, "", 0.0, "none")]
