"""Devices that are sick, and devices that others use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.hardware.health import Facts, Health, Process, judge

OnMachine = Callable[..., Any]
GIB = 1024**3

HEALTH = """
import dataclasses, json
from pytest_accel.hardware.inventory import Machine, describe, parse_kind
from pytest_accel.hardware.device import DeviceNeed
from pytest_accel.hardware.needs import shortfall
machine = Machine(parse_kind("cuda"), skip_busy=BUSY, environ={})
inventory = machine.session
print(json.dumps({
    "devices": [device.id for device in inventory.devices],
    "header": describe(inventory),
    "three": shortfall(DeviceNeed(3), inventory),
}))
"""


def gpu(number: int, *more: str) -> tuple[str, ...]:
    return (f"gpu GPU-{number}", "name NVIDIA T4", f"memory {16 * GIB} {16 * GIB}", f"pci ff00 {number} 0", *more)


@pytest.mark.parametrize(
    ("facts", "own", "health"),
    [
        (Facts(), (), Health()),
        (Facts(compute_mode="exclusive_process"), (), Health()),
        (Facts(compute_mode="prohibited"), (), Health("sick", "its compute mode is PROHIBITED")),
        (Facts(remap_failed=True), (), Health("sick", "it has failed to replace a broken row of its memory")),
        (
            Facts(ecc_errors=1, processes=(Process(7),)),
            (),
            Health("sick", "it has had an uncorrectable memory error (ECC) since its driver was loaded"),
        ),
        (
            Facts(ecc_errors=12),
            (),
            Health("sick", "it has had 12 uncorrectable memory errors (ECC) since its driver was loaded"),
        ),
        (Facts((Process(7, 2 * GIB),)), (), Health("busy", "is used by pid 7 (trainer, 2 GiB)")),
        (Facts((Process(7), Process(8))), (7,), Health("busy", "is used by pid 8 (not to be seen from here)")),
        (Facts((Process(7), Process(8))), (7, 8), Health()),
    ],
)
def test_the_verdict_on_a_device(facts: Facts, own: tuple[int, ...], health: Health) -> None:
    assert judge(facts, own, {7: "trainer"}) == health


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ("ecc 2", "it has had 2 uncorrectable memory errors (ECC) since its driver was loaded"),
        ("retiring 1", "it has broken memory pages that stay in use until the driver is loaded anew"),
        ("unmapped 1", "it has failed to replace a broken row of its memory"),
        ("compute 2", "its compute mode is PROHIBITED"),
    ],
)
@pytest.mark.parametrize("busy", ["True", "False"])
def test_sick_gpus_are_left_out(on_machine: OnMachine, fact: str, reason: str, busy: str) -> None:
    found = on_machine(HEALTH.replace("BUSY", busy), *gpu(1, fact), *gpu(2, "ecc 0", "retiring 0", "unmapped 0"))
    assert found["devices"] == ["GPU-2"]
    assert f"NVIDIA T4 (GPU-1) is left out: {reason}" in found["header"]


def test_what_a_driver_does_not_tell_is_no_sickness(on_machine: OnMachine) -> None:
    found = on_machine(HEALTH.replace("BUSY", "True"), *gpu(1), driver="old")
    assert found["devices"] == ["GPU-1"]


@pytest.mark.parametrize("driver", ["new", "old"])
def test_busy_gpus_are_skipped_where_asked(on_machine: OnMachine, driver: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    holder = subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}).read()"])
    try:
        facts = (*gpu(1, f"process {holder.pid} {3 * GIB}"), *gpu(2), *gpu(3))
        found = on_machine(HEALTH.replace("BUSY", "True"), *facts, driver=driver)
        told = f"left out as busy: NVIDIA T4 (GPU-1) is used by pid {holder.pid} (python"
        assert found["devices"] == ["GPU-2", "GPU-3"]
        assert told in found["header"]
        assert told in found["three"]
        assert ", 3 GiB)" in found["three"]
        found = on_machine(HEALTH.replace("BUSY", "False"), *facts, driver=driver)
        assert found["devices"] == ["GPU-1", "GPU-2", "GPU-3"]
        assert found["three"] is None
        assert "busy" not in found["header"]
    finally:
        pipe.write_text("")
        holder.wait()


def test_the_sessions_own_processes_make_nothing_busy(on_machine: OnMachine) -> None:
    code = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
with open(os.environ["FAKE_NVML"], "a") as file:
    file.write(f"process {os.getpid()} 1\\nprocess {child.pid} 1\\n")
try:
    exec(CODE)
finally:
    child.communicate()
"""
    found = on_machine(code.replace("CODE", repr(HEALTH.replace("BUSY", "True"))), *gpu(1))
    assert found["devices"] == ["GPU-1"]


def test_a_gpu_for_one_process_at_a_time_is_told(on_machine: OnMachine) -> None:
    found = on_machine(HEALTH.replace("BUSY", "False"), *gpu(1, "compute 3"))
    assert "NVIDIA T4 (GPU-1) serves one process at a time (compute mode EXCLUSIVE_PROCESS)" in found["header"]
