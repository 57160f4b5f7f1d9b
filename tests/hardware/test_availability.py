"""Tests of devices that are unavailable for a while, and of those that are set aside for the rest of the session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.hardware.availability import RECOVERY_TIMEOUT, Recovery, recovery
from pytest_accel.hardware.health import Health

OnMachine = Callable[..., Any]
GIB = 1024**3
T4 = ("gpu GPU-1", "name NVIDIA T4", "pci ff00 1 0")
WHOLE = f"memory {16 * GIB} {16 * GIB}"


@pytest.mark.parametrize(
    ("before", "health", "waited", "found"),
    [
        (16 * GIB, Health(memory_free=16 * GIB), 0.0, Recovery("recovered")),
        (16 * GIB, Health(memory_free=16 * GIB - 512 * 1024**2), 0.0, Recovery("recovered")),
        (16 * GIB, Health(memory_free=15 * GIB), 0.0, Recovery("waiting")),
        (16 * GIB, Health(memory_free=15 * GIB), RECOVERY_TIMEOUT - 0.1, Recovery("waiting")),
        (
            16 * GIB,
            Health(memory_free=13 * GIB),
            RECOVERY_TIMEOUT,
            Recovery("failed", "3 GiB of its memory were not released within 30 s after its processes were killed"),
        ),
        (16 * GIB, Health("busy", "is used by pid 7", memory_free=13 * GIB), RECOVERY_TIMEOUT, Recovery("recovered")),
        (16 * GIB, Health("busy", "has much in use", memory_free=13 * GIB, unseen=True), 0.0, Recovery("waiting")),
        (
            16 * GIB,
            Health("sick", "it has had an error", memory_free=16 * GIB),
            0.0,
            Recovery("failed", "it has had an error"),
        ),
        (None, Health(memory_free=1), 0.0, Recovery("recovered")),
        (16 * GIB, Health(), 0.0, Recovery("recovered")),
    ],
)
def test_a_device_whose_processes_were_killed_is_checked(
    before: int | None, health: Health, waited: float, found: Recovery
) -> None:
    assert recovery(before, health, waited) == found


GUARD = """
import json, os, pathlib
from pytest_accel.hardware.vendors.cuda import Cuda
from pytest_accel.hardware.availability import Guard

now = 0.0
vendor = Cuda()
devices = vendor.discover()
guard = Guard(vendor, devices, os.getpid(), waits=WAITS, clock=lambda: now)
file = pathlib.Path(os.environ["FAKE_NVML"])
text = file.read_text()
said = []

def look(after, *changes):
    global now
    now += after
    changed = text
    for one, other in changes:
        assert one in changed
        changed = changed.replace(one, other)
    file.write_text(changed)
    said.append(guard.refuses("GPU-1"))

STEPS
print(json.dumps({"said": said, "aside": guard.aside}))
"""


def guard(steps: str, *, waits: bool = False) -> str:
    return GUARD.replace("STEPS", steps).replace("WAITS", str(waits))


# A change of the machine for `look`: 12 instead of 16 GiB of memory are free.
LESS = f"(' {16 * GIB}\\n', ' {12 * GIB}\\n')"


def test_a_device_waits_for_its_memory_to_be_released_after_a_kill(on_machine: OnMachine) -> None:
    steps = f"look(0, {LESS}); guard.suspect(['GPU-1']); look(9, {LESS}); look(1, {LESS}); look(1); look(1, {LESS})"
    found = on_machine(guard(steps), *T4, WHOLE)
    waiting = "waits for its memory to be released"
    assert found == {"said": [None, waiting, waiting, None, None], "aside": {}}


def test_a_device_whose_memory_is_not_released_is_set_aside(on_machine: OnMachine) -> None:
    steps = f"guard.suspect(['GPU-1']); look(1000, {LESS}); look(29, {LESS}); look(1, {LESS}); look(99)"
    found = on_machine(guard(steps), *T4, WHOLE)
    lost = "4 GiB of its memory were not released within 30 s after its processes were killed"
    waiting = "waits for its memory to be released"
    assert found == {"said": [waiting, waiting, lost, lost], "aside": {"GPU-1": lost}}


def test_a_device_with_a_lasting_error_is_set_aside_at_once(on_machine: OnMachine) -> None:
    steps = "look(1); guard.suspect(['GPU-1']); look(1, ('ecc 0 0', 'ecc 2 2')); look(9)"
    found = on_machine(guard(steps), *T4, WHOLE, "ecc 0 0")
    sick = "it has had 2 uncorrectable memory errors (ECC) since its driver was loaded"
    assert found == {"said": [None, sick, sick], "aside": {"GPU-1": sick}}


def test_a_gpu_that_has_fallen_off_the_bus_is_set_aside(on_machine: OnMachine) -> None:
    steps = "guard.suspect(['GPU-1']); look(1, ('#', 'refuse nvmlDeviceGetMemoryInfo 15')); look(9)"
    lost = "its driver cannot reach it any more"
    assert on_machine(guard(steps), *T4, WHOLE, "#") == {"said": [lost, lost], "aside": {"GPU-1": lost}}


def test_a_busy_device_is_unavailable_if_the_session_waits_for_busy_devices(on_machine: OnMachine) -> None:
    busy = f"process {os.getpid()} {2 * GIB}"
    steps = f"look(1); look(1, ('{busy}\\n', '')); look(0.1); look(1)"
    [first, *others] = on_machine(guard(steps, waits=True), *T4, WHOLE, busy)["said"]
    assert first.startswith(f"is used by pid {os.getpid()} (")
    assert others[0] is None
    # The driver is asked again only after a while.
    assert others[1] is None
    assert others[2] is not None
    assert on_machine(guard(steps), *T4, WHOLE, busy)["said"] == [None] * 4


SUPPLY = """
import json, os, pathlib, queue
from pytest_accel.hardware import availability as guard
from pytest_accel.core.device import DeviceNeed
from pytest_accel.hardware.inventory import Machine, parse_kind
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.allocator import Allocator

file = pathlib.Path(os.environ["FAKE_NVML"])
machine = Machine(parse_kind("cuda"), environ={})
supply = Allocator(machine, 1, lambda kind, lease: None, lambda kind, lease, why: None, waits_for_busy=WAITS)
leases, failures = queue.Queue(), queue.Queue()
need = DeviceNeed(1, kind="cuda")
submit = lambda: supply.submit("cuda", need, Holder.here("test_it"), leases.put, failures.put)
"""


def test_a_lease_on_a_busy_device_is_granted_when_it_is_free(on_machine: OnMachine, tmp_path: Path) -> None:
    code = """
request = submit()
before = (leases.empty(), supply.obstacles("cuda", request))
file.write_text(file.read_text().replace("process", "#"))
lease = leases.get(timeout=60)
supply.close()
print(json.dumps([*before, lease.devices]))
"""
    busy = f"process {os.getpid()} {2 * GIB}"
    empty, obstacles, devices = on_machine(
        (SUPPLY + code).replace("WAITS", "True"), *T4, WHOLE, busy, PYTEST_ACCEL_LOCK_DIR=str(tmp_path / "locks")
    )
    assert empty is True
    assert len(obstacles) == 1
    assert obstacles[0].startswith(f"GPU-1 is used by pid {os.getpid()} (")
    assert devices == ["GPU-1"]


def test_a_test_that_needs_a_device_that_is_set_aside_gets_the_reason(on_machine: OnMachine, tmp_path: Path) -> None:
    code = """
guard.RECOVERY_TIMEOUT = 0.0
submit()
lease = leases.get_nowait()
text = file.read_text()
file.write_text(text.replace(f"memory {16 << 30} {16 << 30}", f"memory {16 << 30} {1 << 30}"))
supply.give_back("cuda", lease, killed=KILLED)
before = supply.unavailable("cuda", need)
submit()
after = supply.unavailable("cuda", need)
given = leases.empty()
supply.close()
print(json.dumps([before, given, after]))
"""

    def run(killed: bool) -> Any:
        locks = str(tmp_path / f"locks{killed}")
        script = (SUPPLY + code).replace("WAITS", "False").replace("KILLED", str(killed))
        return on_machine(script, *T4, WHOLE, PYTEST_ACCEL_LOCK_DIR=locks)

    assert run(False) == [None, False, None]
    assert run(True) == [
        None,
        True,
        "needs 1 cuda device; there is none to use\nGPU-1 was set aside: "
        "15 GiB of its memory were not released within 0 s after its processes were killed",
    ]


def test_a_session_names_the_holder_of_the_device_that_it_waited_for(
    drivers: dict[str, Path], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = tmp_path / "machine.txt"
    machine.write_text("\n".join([*T4, WHOLE, f"process {os.getpid()} {2 * GIB}"]))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(drivers["new"]))
    monkeypatch.setenv("FAKE_NVML", str(machine))
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile("import pytest\n\n\n@pytest.mark.devices\ndef test_it(): ...\n")
    options = ("--accel=cuda", "--accel-busy=wait", "--accel-wait=0.2", "-p", "accel")
    run = pytester.runpytest_subprocess(*options)
    run.assert_outcomes(errors=1)
    run.stdout.fnmatch_lines(
        [
            "no devices came free within 0.2 s (--accel-wait)",
            f"GPU-1 is used by pid {os.getpid()} (*, 2 GiB)",
        ]
    )
