"""Tests of the health of devices: faulty devices, devices that others use, and devices that wait for their memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.core.device import Device
from pytest_accel.hardware.health import Facts, Guard, Health, judge, judge_all
from tests.hardware.conftest import OnMachine, gpu

GIB = 1024**3
NOT_SUPPORTED = 3
NO_PID = 2**22 + 1
"""A process id above the largest one of Linux."""

HEALTH = """
import json, os
from pytest_accel.hardware.inventory import Machine, describe
from pytest_accel.core.device import DeviceNeed
from pytest_accel.hardware.matching import shortfall
machine = Machine("cuda", os.environ.get("ONLY"), skip_busy=BUSY)
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


class ScriptedCard:
    """A vendor with one device, a time, and an answer of the driver; it records what a guard says of the device."""

    def __init__(self, free: int = 16, *, waits: bool = False) -> None:
        self.now = 0.0
        device = Device("cuda", "GPU-1", 0, "NVIDIA T4", memory=16 * GIB, memory_free=free * GIB)
        self.guard = Guard(self, [device], os.getpid(), waits=waits, clock=lambda: self.now)

    def health(self, devices: Sequence[Device], session: int | None = None) -> Mapping[str, Health]:
        return judge_all({device.id: self.facts for device in devices}, session)

    def look(self, after: float, free: int, *users: tuple[int, int], ecc: int = 0, lost: bool = False) -> str | None:
        """Return why the device may not be leased, `after` seconds, if `free` GiB are free and `users` use the rest."""
        self.now += after
        processes = {pid: gib * GIB for pid, gib in users}
        self.facts = Facts(processes, ecc, lost=lost, memory_used=(16 - free) * GIB, memory_free=free * GIB)
        return self.guard.refuses("GPU-1")


WAITING = "waits for its memory to be released"


def test_a_device_waits_for_the_memory_of_a_killed_process() -> None:
    card = ScriptedCard()
    card.guard.suspect(["GPU-1"], [NO_PID])
    assert [card.look(99, 12, (NO_PID, 4)), card.look(2, 12, (NO_PID, 4))] == [WAITING, WAITING]
    assert [card.look(1, 16), card.look(1, 12)] == [None, None]
    assert card.guard.aside == {}


def test_a_device_whose_memory_is_not_released_is_leased_after_a_while() -> None:
    card, killed = ScriptedCard(), (NO_PID, 4)
    card.guard.suspect(["GPU-1"], [NO_PID])
    assert [card.look(99, 12, killed), card.look(4.9, 12, killed), card.look(0.2, 12, killed)] == [WAITING] * 2 + [None]


def test_processes_that_are_alive_are_not_waited_for() -> None:
    """The processes are the session's main process, one that it has started, and one of another program."""
    card, other = ScriptedCard(), os.getppid()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        card.guard.suspect(["GPU-1"], [NO_PID])
        assert card.look(0, 12, (os.getpid(), 1), (worker.pid, 1), (other, 2)) is None
        worker.communicate()
    assert card.guard.aside == {}


def test_if_the_driver_lists_no_process_missing_memory_is_waited_for_once() -> None:
    card = ScriptedCard()
    card.guard.suspect(["GPU-1"], [NO_PID])
    assert [card.look(99, 12), card.look(4.9, 14), card.look(0.2, 14)] == [WAITING] * 2 + [None]
    # The same if some are of another pid namespace.
    card.guard.suspect(["GPU-1"], [NO_PID])
    assert card.look(1, 12, (NO_PID + 1, 4)) == WAITING
    assert card.look(5, 14) is None
    # The second time, the same memory is missing, and nothing is waited for.
    card.guard.suspect(["GPU-1"], [NO_PID])
    assert card.look(1, 14) is None


def test_a_device_with_a_lasting_error_is_set_aside_at_once() -> None:
    sick = "it has had 2 uncorrectable memory errors (ECC) since its driver was loaded"
    gone = "its driver cannot reach it any more"
    for ecc, lost, why in ((2, False, sick), (0, True, gone)):
        card = ScriptedCard()
        assert card.look(1, 16, ecc=ecc, lost=lost) is None, "the driver is asked only after a kill"
        card.guard.suspect(["GPU-1"], [7])
        assert [card.look(1, 16, ecc=ecc, lost=lost), card.look(9, 16)] == [why, why]
        assert card.guard.aside == {"GPU-1": why}


def test_a_busy_device_is_unavailable_if_the_session_waits_for_busy_devices() -> None:
    card, user = ScriptedCard(waits=True), (os.getppid(), 2)
    first = card.look(1, 14, user)
    assert first is not None
    assert first.startswith(f"is used by pid {os.getppid()} (")
    # The driver is asked again only after a while.
    assert [card.look(1, 16), card.look(0.1, 14, user), card.look(1, 14, user)] == [None, None, first]
    assert ScriptedCard().look(1, 14, user) is None


def test_memory_of_no_visible_process_keeps_a_device_busy_only_if_it_was_in_use_from_the_start() -> None:
    card = ScriptedCard(waits=True)
    assert [card.look(1, 16), card.look(1, 12)] == [None, None]
    busy = "has 4 GiB of its memory in use, but no process on it is visible from here"
    card = ScriptedCard(12, waits=True)
    assert [card.look(1, 12), card.look(1, 16), card.look(1, 12)] == [busy, None, None]


def test_a_session_names_the_holder_of_the_device_that_it_waited_for(
    drivers: dict[str, Path], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = tmp_path / "machine.txt"
    machine.write_text("\n".join(gpu(1, f"process {os.getpid()} {2 * GIB}")))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(drivers["new"]))
    monkeypatch.setenv("FAKE_NVML", str(machine))
    monkeypatch.setenv("PYTEST_ACCEL_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pytester.makepyfile("import pytest\n\n\n@pytest.mark.devices\ndef test_it(): ...\n")
    options = ("--accel=cuda", "-o", "accel_busy=wait", "--accel-wait=0.2", "-p", "accel")
    run = pytester.runpytest_subprocess(*options)
    run.assert_outcomes(errors=1)
    run.stdout.fnmatch_lines(
        [
            "no devices came free within 0.2 s (--accel-wait)",
            f"GPU-1 is used by pid {os.getpid()} (*, 2 GiB)",
        ]
    )
