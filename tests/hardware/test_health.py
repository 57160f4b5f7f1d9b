"""Tests of the health of devices: faulty devices, and devices that other processes use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.hardware.health import Facts, Health, judge
from tests.hardware.conftest import OnMachine, gpu

GIB = 1024**3
NOT_SUPPORTED = 3
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
from pytest_accel.hardware.registry import make_vendor
vendor = make_vendor("cuda")
devices = vendor.discover()
health = vendor.health(devices, int(os.environ.get("SESSION", os.getpid())))
print(json.dumps({name: [one.state, one.reason] for name, one in health.items()}))
"""


@pytest.mark.parametrize(
    ("facts", "own", "health"),
    [
        (Facts(), set(), Health()),
        (Facts(compute_mode="exclusive_process"), set(), Health()),
        (Facts(compute_mode="prohibited"), set(), Health("sick", "its compute mode is PROHIBITED")),
        (Facts(lost=True), set(), Health("sick", "its driver cannot reach it any more")),
        (Facts(remap_failed=True), set(), Health("sick", "it has failed to replace a broken row of its memory")),
        (
            Facts(retirement_pending=True),
            set(),
            Health("sick", "it has broken memory pages that stay in use until the driver is reloaded"),
        ),
        (
            Facts(ecc_errors=1, processes={7: None}),
            set(),
            Health("sick", "it has had an uncorrectable memory error (ECC) since its driver was loaded"),
        ),
        (
            Facts({7: 2 * GIB}),
            set(),
            Health("busy", "is used by pid 7 (trainer, 2 GiB)", None, frozenset({7}), sees_users=True),
        ),
        (
            Facts({7: None, 8: None}),
            {7},
            Health("busy", "is used by pid 8 (not visible from here)", None, frozenset({7, 8})),
        ),
        (Facts({7: None, 8: GIB}), {7, 8}, Health(pids=frozenset({7, 8}))),
    ],
)
def test_health_follows_from_the_properties_of_a_device(facts: Facts, own: set[int], health: Health) -> None:
    assert judge(facts, own, {7: "trainer"}) == health


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that waits until its standard input is closed."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with process:
        yield process


def name_of(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip()


def test_busy_gpus_are_skipped_on_request(on_machine: OnMachine, holder: subprocess.Popen[bytes]) -> None:
    facts = (*gpu(1, f"process {holder.pid} {3 * GIB}"), *gpu(2), *gpu(3))
    found = on_machine(HEALTH.replace("BUSY", "True"), *facts)
    busy = f"left out as busy: NVIDIA T4 (GPU-1) is used by pid {holder.pid} ({name_of(holder)}, 3 GiB)"
    assert found["devices"] == ["GPU-2", "GPU-3"]
    assert busy in found["header"]
    assert busy in found["three"]
    found = on_machine(HEALTH.replace("BUSY", "False"), *facts)
    assert found["devices"] == ["GPU-1", "GPU-2", "GPU-3"]
    assert found["three"] is None
    assert "busy" not in found["header"]


def test_all_holders_of_a_gpu_or_instance_are_named(on_machine: OnMachine, holder: subprocess.Popen[bytes]) -> None:
    processes = (f"process {holder.pid} {2 * GIB}", f"process {NO_PID} -1")
    holders = f"is used by pid {holder.pid} ({name_of(holder)}, 2 GiB), pid {NO_PID} (not visible from here)"
    assert on_machine(VENDOR, *gpu(1), *gpu(2, *processes)) == {"GPU-1": ["fine", ""], "GPU-2": ["busy", holders]}
    parts = (f"mig 0 MIG-5 {GIB} a", f"mig 1 MIG-6 {GIB} b", *processes)
    assert on_machine(VENDOR, *gpu(1, *parts)) == {"MIG-5": ["fine", ""], "MIG-6": ["busy", holders]}


def test_health_that_changes_after_discovery(on_machine: OnMachine) -> None:
    card, part = gpu(1, f"process {NO_PID} 1"), gpu(1, f"mig 0 MIG-5 {GIB} NVIDIA T4 MIG")

    def later(code: str, *facts: str) -> Any:
        return on_machine(VENDOR.replace("health =", f"{code}\nhealth ="), *facts)

    add = 'print("{}", file=open(os.environ["FAKE_NVML"], "a"))'
    assert later('os.environ["FAKE_NVML"] = "/nowhere"', *card) == {"GPU-1": ["fine", ""]}
    lost = later(add.format("refuse nvmlDeviceGetMemoryInfo 15"), *card)
    assert lost == {"GPU-1": ["sick", "its driver cannot reach it any more"]}
    # The instances of a sick card are sick.
    sick = "it has had an uncorrectable memory error (ECC) since its driver was loaded"
    assert later(add.format("ecc 1 1"), *part) == {"MIG-5": ["sick", sick]}
    assert on_machine(VENDOR, *part, "ecc 1 1") == {}


def test_indices_count_busy_devices(on_machine: OnMachine) -> None:
    facts = (*gpu(1, f"process {NO_PID} -1"), *gpu(2), *gpu(3))
    assert on_machine(HEALTH.replace("BUSY", "True"), *facts, ONLY="0,2")["devices"] == ["GPU-3"]
    assert on_machine(HEALTH.replace("BUSY", "True"), *facts, CUDA_VISIBLE_DEVICES="1,0")["devices"] == ["GPU-2"]


@pytest.mark.parametrize("function", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetHandleByUUID"])
def test_a_gpu_is_not_busy_if_the_driver_does_not_report_its_processes(on_machine: OnMachine, function: str) -> None:
    busy = gpu(1, f"process {NO_PID} 1")
    assert on_machine(VENDOR, *busy)["GPU-1"][0] == "busy"
    assert on_machine(VENDOR, f"refuse {function} {NOT_SUPPORTED}", *busy) == {"GPU-1": ["fine", ""]}


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


def test_only_lasting_errors_and_prohibited_gpus_are_left_out(on_machine: OnMachine) -> None:
    # Corrected and contained errors do not count.
    states = ("ecc 0 9", "ecc 1 1", "retiring 1", "remapped 0 1", "compute 2", "compute 3", "remapped 1 0", "")
    facts = [fact for number, state in enumerate(states, 1) for fact in gpu(number, state, name=f"GPU {number}")]
    facts[-1] = f"process {NO_PID} -1"
    found = on_machine(HEALTH.replace("BUSY", "True"), *facts)
    assert found["devices"] == ["GPU-1", "GPU-6", "GPU-7"]
    assert found["header"].count("is left out: ") == 4
    assert found["header"].count("serves one process at a time") == 1
    assert found["header"].count("left out as busy: GPU 8") == 1
