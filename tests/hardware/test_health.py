"""Tests of the health of devices: faulty devices, and devices that other processes use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.hardware.health import Facts, Health, HealthVendor, Process, judge
from pytest_accel.hardware.vendors.cuda import Cuda
from pytest_accel.hardware.vendors.sim import Sim

OnMachine = Callable[..., Any]
GIB = 1024**3
NOT_SUPPORTED, NO_PERMISSION, UNKNOWN = 3, 4, 999
NO_PID = 2**22 + 1
"""A process id above the largest one of Linux."""

HEALTH = """
import json, os
from pytest_accel.hardware.inventory import Machine, describe, parse_kind
from pytest_accel.core.device import DeviceNeed
from pytest_accel.hardware.matching import shortfall
machine = Machine(parse_kind("cuda"), os.environ.get("ONLY"), skip_busy=BUSY)
inventory = machine.session
print(json.dumps({
    "devices": [device.id for device in inventory.devices],
    "header": describe(inventory),
    "three": shortfall(DeviceNeed(3), inventory),
}))
"""


# Prints the health of each device, as it is for the session whose process id is SESSION.
VENDOR = """
import json, os
from pytest_accel.hardware.vendors.cuda import Cuda
vendor = Cuda()
devices = vendor.discover()
health = vendor.health(devices, int(os.environ.get("SESSION", os.getpid())))
print(json.dumps({name: [one.state, one.reason] for name, one in health.items()}))
"""


def gpu(number: int, *more: str, name: str = "NVIDIA T4") -> tuple[str, ...]:
    return (f"gpu GPU-{number}", f"name {name}", f"memory {16 * GIB} {16 * GIB}", f"pci ff00 {number} 0", *more)


@pytest.mark.parametrize(
    ("facts", "own", "health"),
    [
        (Facts(), {}, Health()),
        (Facts(compute_mode="exclusive_process"), {}, Health()),
        (Facts(compute_mode="prohibited"), {}, Health("sick", "its compute mode is PROHIBITED")),
        (Facts(remap_failed=True), {}, Health("sick", "it has failed to replace a broken row of its memory")),
        (
            Facts(ecc_errors=1, processes=(Process(7),)),
            {},
            Health("sick", "it has had an uncorrectable memory error (ECC) since its driver was loaded"),
        ),
        (
            Facts(ecc_errors=12),
            {},
            Health("sick", "it has had 12 uncorrectable memory errors (ECC) since its driver was loaded"),
        ),
        (
            Facts((Process(7, 2 * GIB),)),
            {},
            Health(
                *("busy", "is used by pid 7 (trainer, 2 GiB)", None, frozenset({7})),
                sees_users=True,
                users="pid 7 (trainer, 2 GiB)",
            ),
        ),
        (
            Facts((Process(7), Process(8))),
            {7: ""},
            Health(
                *("busy", "is used by pid 8 (not visible from here)", None, frozenset({7, 8})),
                users="pid 8 (not visible from here)",
            ),
        ),
        (
            Facts((Process(7), Process(8, GIB))),
            {7: "", 8: "ours"},
            Health(pids=frozenset({7, 8}), users="pid 8 (ours, 1 GiB)"),
        ),
    ],
)
def test_health_follows_from_the_properties_of_a_device(facts: Facts, own: dict[int, str], health: Health) -> None:
    assert judge(facts, own, {7: "trainer"}) == health


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ("ecc 2 2", "it has had 2 uncorrectable memory errors (ECC) since its driver was loaded"),
        ("retiring 1", "it has broken memory pages that stay in use until the driver is reloaded"),
        ("remapped 0 1", "it has failed to replace a broken row of its memory"),
        ("compute 2", "its compute mode is PROHIBITED"),
    ],
)
@pytest.mark.parametrize("busy", ["True", "False"])
def test_sick_gpus_are_left_out(on_machine: OnMachine, fact: str, reason: str, busy: str) -> None:
    found = on_machine(HEALTH.replace("BUSY", busy), *gpu(1, fact), *gpu(2, "ecc 0 0", "retiring 0", "remapped 0 0"))
    assert found["devices"] == ["GPU-2"]
    assert f"NVIDIA T4 (GPU-1) is left out: {reason}" in found["header"]


def test_a_device_without_reported_errors_is_healthy(on_machine: OnMachine) -> None:
    found = on_machine(HEALTH.replace("BUSY", "True"), *gpu(1), driver="old")
    assert found["devices"] == ["GPU-1"]


@pytest.mark.parametrize("fact", ["ecc 0 9", "retiring 0", "remapped 1 0", "compute 0", "compute 3"])
def test_corrected_and_contained_errors_do_not_count(on_machine: OnMachine, fact: str) -> None:
    assert on_machine(VENDOR, *gpu(1, fact)) == {"GPU-1": ["fine", ""]}


def test_the_instances_of_a_sick_card_are_sick(on_machine: OnMachine) -> None:
    part = f"mig 0 MIG-5 {GIB} NVIDIA T4 MIG"
    assert on_machine(VENDOR, *gpu(1, part)) == {"MIG-5": ["fine", ""]}
    assert on_machine(VENDOR, *gpu(1, "ecc 1 1", part)) == {}
    # The card fails after its discovery.
    later = VENDOR.replace("health =", 'print("ecc 1 1", file=open(os.environ["FAKE_NVML"], "a"))\nhealth =')
    sick = "it has had an uncorrectable memory error (ECC) since its driver was loaded"
    assert on_machine(later, *gpu(1, part)) == {"MIG-5": ["sick", sick]}


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that waits until its standard input is closed."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with process:
        yield process


def name_of(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("driver", ["new", "old"])
def test_busy_gpus_are_skipped_on_request(on_machine: OnMachine, holder: subprocess.Popen[bytes], driver: str) -> None:
    facts = (*gpu(1, f"process {holder.pid} {3 * GIB}"), *gpu(2), *gpu(3))
    found = on_machine(HEALTH.replace("BUSY", "True"), *facts, driver=driver)
    busy = f"left out as busy: NVIDIA T4 (GPU-1) is used by pid {holder.pid} ({name_of(holder)}, 3 GiB)"
    assert found["devices"] == ["GPU-2", "GPU-3"]
    assert busy in found["header"]
    assert busy in found["three"]
    found = on_machine(HEALTH.replace("BUSY", "False"), *facts, driver=driver)
    assert found["devices"] == ["GPU-1", "GPU-2", "GPU-3"]
    assert found["three"] is None
    assert "busy" not in found["header"]


@pytest.mark.parametrize("driver", ["new", "old"])
def test_all_holders_are_named_with_the_memory_that_the_driver_reports(
    on_machine: OnMachine, holder: subprocess.Popen[bytes], driver: str
) -> None:
    processes = (f"process {holder.pid} {2 * GIB}", f"process {NO_PID} -1")
    found = on_machine(VENDOR, *gpu(1), *gpu(2, *processes), driver=driver)
    holders = f"pid {holder.pid} ({name_of(holder)}, 2 GiB), pid {NO_PID} (not visible from here)"
    assert found == {"GPU-1": ["fine", ""], "GPU-2": ["busy", f"is used by {holders}"]}


def test_an_instance_is_busy_if_a_process_uses_it(on_machine: OnMachine, holder: subprocess.Popen[bytes]) -> None:
    parts = (f"mig 0 MIG-5 {GIB} a", f"mig 1 MIG-6 {GIB} b", f"process {holder.pid} -1")
    reason = f"is used by pid {holder.pid} ({name_of(holder)})"
    assert on_machine(VENDOR, *gpu(1, *parts)) == {"MIG-5": ["fine", ""], "MIG-6": ["busy", reason]}


def test_indices_count_busy_devices(on_machine: OnMachine) -> None:
    facts = (*gpu(1, f"process {NO_PID} -1"), *gpu(2), *gpu(3))
    assert on_machine(HEALTH.replace("BUSY", "True"), *facts, ONLY="0,2")["devices"] == ["GPU-3"]
    assert on_machine(HEALTH.replace("BUSY", "True"), *facts, CUDA_VISIBLE_DEVICES="1,0")["devices"] == ["GPU-2"]


@pytest.mark.parametrize("code", [NO_PERMISSION, NOT_SUPPORTED, UNKNOWN])
@pytest.mark.parametrize(
    "functions",
    [
        ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
        ("nvmlDeviceGetHandleByUUID",),
    ],
)
def test_a_gpu_is_not_busy_if_the_driver_does_not_report_its_processes(
    on_machine: OnMachine, functions: tuple[str, ...], code: int
) -> None:
    busy = gpu(1, f"process {NO_PID} 1")
    assert on_machine(VENDOR, *busy)["GPU-1"][0] == "busy"
    refused = [f"refuse {function} {code}" for function in functions]
    assert on_machine(VENDOR, *refused, *busy) == {"GPU-1": ["fine", ""]}


def test_no_gpu_is_busy_if_the_driver_no_longer_answers(on_machine: OnMachine) -> None:
    gone = VENDOR.replace("health =", 'os.environ["FAKE_NVML"] = "/nowhere"\nhealth =')
    assert on_machine(gone, *gpu(1, f"process {NO_PID} 1")) == {"GPU-1": ["fine", ""]}


def test_the_requesting_session_and_its_descendants_do_not_count_as_users(
    on_machine: OnMachine, holder: subprocess.Popen[bytes]
) -> None:
    facts = gpu(1, f"process {holder.pid} {GIB}", f"process {os.getpid()} {GIB}")
    assert on_machine(VENDOR, *facts, SESSION=str(os.getpid())) == {"GPU-1": ["fine", ""]}
    # Descendants of the session belong to it, its ancestors do not.
    state, reason = on_machine(VENDOR, *facts, SESSION=str(holder.pid))["GPU-1"]
    assert state == "busy"
    assert f"pid {os.getpid()} " in reason
    assert f"pid {holder.pid} " not in reason


def test_processes_of_the_session_do_not_count_as_users(on_machine: OnMachine) -> None:
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


def test_a_gpu_in_exclusive_mode_is_reported(on_machine: OnMachine) -> None:
    found = on_machine(HEALTH.replace("BUSY", "False"), *gpu(1, "compute 3"))
    assert "NVIDIA T4 (GPU-1) serves one process at a time (compute mode EXCLUSIVE_PROCESS)" in found["header"]


def test_eight_gpus_in_different_states(on_machine: OnMachine) -> None:
    states = ("ecc 0 0", "ecc 1 1", "retiring 1", "remapped 0 1", "compute 2", "compute 3", "remapped 1 0")
    facts = [fact for number, state in enumerate(states, 1) for fact in gpu(number, state, name=f"GPU {number}")]
    facts += gpu(8, f"process {NO_PID} -1", name="GPU 8")
    found = on_machine(HEALTH.replace("BUSY", "True"), *facts)
    assert found["devices"] == ["GPU-1", "GPU-6", "GPU-7"]
    assert found["header"].count("is left out: ") == 4
    assert found["header"].count("serves one process at a time") == 1
    assert found["header"].count("left out as busy: GPU 8") == 1


def test_health_checks_neither_initialise_cuda_nor_import_torch(on_machine: OnMachine) -> None:
    state = "['torch' in sys.modules, open('/proc/self/maps').read().count('libcuda.so')]"
    code = f"{VENDOR.replace('print', 'str')}\nimport sys\nprint(json.dumps({state}))"
    assert on_machine(code, *gpu(1, f"process {NO_PID} 1"), driver="cuda") == [False, 0]


def test_vendors_without_health_checks_have_none() -> None:
    assert isinstance(Cuda(), HealthVendor)
    assert not isinstance(Sim(1), HealthVendor)
    assert Cuda().health(()) == {}
