"""Tests of devices that are unavailable for a while, and of those that are set aside for the rest of the session."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_accel.hardware.availability import RECOVERY_TIMEOUT, SETTLE_TIME, Suspect, recovery
from pytest_accel.hardware.health import Health

OnMachine = Callable[..., Any]
GIB = 1024**3
T4 = ("gpu GPU-1", "name NVIDIA T4", "pci ff00 1 0")
WHOLE = f"memory {16 * GIB} {16 * GIB}"


@pytest.mark.parametrize(
    ("expected", "health", "now", "found"),
    [
        (16 * GIB, Health(memory_free=16 * GIB), 10.0, "recovered"),
        (16 * GIB, Health(memory_free=16 * GIB - 512 * 1024**2), 10.0, "recovered"),
        (None, Health(memory_free=1), 10.0, "recovered"),
        (16 * GIB, Health(), 10.0, "recovered"),
        # The driver lists the killed process.
        (16 * GIB, Health(memory_free=15 * GIB, pids=frozenset({7})), 10.0 + RECOVERY_TIMEOUT - 0.1, "waiting"),
        (16 * GIB, Health(memory_free=15 * GIB, pids=frozenset({7})), 10.0 + RECOVERY_TIMEOUT, "missing"),
        # The driver lists others, and all of them can be seen.
        (16 * GIB, Health(memory_free=1, pids=frozenset({8}), sees_users=True), 10.0, "missing"),
        # The driver lists no process, or some of another pid namespace.
        (16 * GIB, Health(memory_free=15 * GIB), 11.0 + SETTLE_TIME - 0.1, "waiting"),
        (16 * GIB, Health(memory_free=15 * GIB, pids=frozenset({8})), 11.0 + SETTLE_TIME - 0.1, "waiting"),
        (16 * GIB, Health(memory_free=15 * GIB), 11.0 + SETTLE_TIME, "missing"),
    ],
)
def test_only_killed_processes_are_waited_for(expected: int | None, health: Health, now: float, found: str) -> None:
    suspect = Suspect(frozenset({7}), since=10.0, memory_free=15 * GIB, risen=11.0)
    assert recovery(expected, health, suspect, now) == found


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
print(json.dumps({"said": said, "aside": guard.aside, "missing": guard.missing}))
"""


def guard(steps: str, *, waits: bool = False) -> str:
    return GUARD.replace("STEPS", steps).replace("WAITS", str(waits))


# A change of the machine for `look`: 12 instead of 16 GiB of memory are free.
LESS = f"(' {16 * GIB}\\n', ' {12 * GIB}\\n')"


WAITING = "waits for its memory to be released"
KILLED = 4194305  # Larger than any pid of Linux, so that no process has it.
LISTED = f"process {KILLED} {4 * GIB}"
RELEASED = f"('{LISTED}', '#')"


def test_a_device_waits_for_the_memory_of_a_killed_process(on_machine: OnMachine) -> None:
    steps = (
        f"guard.suspect(['GPU-1'], [{KILLED}]); look(99, {LESS}); look(2, {LESS}); look(1, {RELEASED}); look(1, {LESS})"
    )
    found = on_machine(guard(steps), *T4, WHOLE, LISTED)
    assert found == {"said": [WAITING, WAITING, None, None], "aside": {}, "missing": {}}


def test_a_device_whose_memory_is_not_released_is_leased_after_a_while_and_reported(on_machine: OnMachine) -> None:
    steps = f"guard.suspect(['GPU-1'], [{KILLED}]); look(99, {LESS}); look(4.9, {LESS}); look(0.2, {LESS})"
    found = on_machine(guard(steps), *T4, WHOLE, LISTED)
    text = (
        "4 GiB of its memory were still in use after its processes were killed, "
        f"by pid {KILLED} (not visible from here, 4 GiB)"
    )
    assert found == {"said": [WAITING, WAITING, None], "aside": {}, "missing": {"GPU-1": text}}


def test_processes_that_are_alive_are_not_waited_for(on_machine: OnMachine) -> None:
    """The processes are the session's main process, one that it has started, and one of another program."""
    steps = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
users = f"process {{os.getpid()}} {{1 << 30}}\\nprocess {{worker.pid}} {{1 << 30}}\\nprocess {os.getpid()} {{2 << 30}}"
guard.suspect(['GPU-1'], [{KILLED}])
look(0, {LESS}, ('#', users))
worker.communicate()
said += [os.getpid(), worker.pid]
"""
    found = on_machine(guard(steps), *T4, WHOLE, "#")
    [refused, main, worker] = found["said"]
    assert refused is None
    assert found["aside"] == {}
    of_session = "in which code of the suite has used the device, 1 GiB"
    assert found["missing"]["GPU-1"].startswith(
        "4 GiB of its memory were still in use after its processes were killed, "
        f"by pid {main} (this session's main process, {of_session}), pid {worker} (this session's, {of_session}), "
        f"pid {os.getpid()} ("
    )


def test_if_the_driver_lists_no_process_the_wait_ends_when_no_more_memory_becomes_free(on_machine: OnMachine) -> None:
    half = f"(' {16 * GIB}\\n', ' {14 * GIB}\\n')"
    steps = f"""
guard.suspect(['GPU-1'], [{KILLED}])
look(99, {LESS}); look(0.9, {half}); look(0.9, {half}); look(0.2, {half})
guard.suspect(['GPU-1'], [{KILLED}])
look(1, {half})
"""
    found = on_machine(guard(steps), *T4, WHOLE)
    in_use = "2 GiB of its memory were still in use after its processes were killed"
    text = f"{in_use}, by no process that the driver shows here"
    # The second time, the same memory is missing, and nothing is waited for.
    assert found == {"said": [WAITING, WAITING, WAITING, None, None], "aside": {}, "missing": {"GPU-1": text}}


def test_a_device_with_a_lasting_error_is_set_aside_at_once(on_machine: OnMachine) -> None:
    steps = "look(1); guard.suspect(['GPU-1'], [7]); look(1, ('ecc 0 0', 'ecc 2 2')); look(9)"
    found = on_machine(guard(steps), *T4, WHOLE, "ecc 0 0")
    sick = "it has had 2 uncorrectable memory errors (ECC) since its driver was loaded"
    assert found == {"said": [None, sick, sick], "aside": {"GPU-1": sick}, "missing": {}}


def test_a_gpu_that_has_fallen_off_the_bus_is_set_aside(on_machine: OnMachine) -> None:
    steps = "guard.suspect(['GPU-1'], [7]); look(1, ('#', 'refuse nvmlDeviceGetMemoryInfo 15')); look(9)"
    lost = "its driver cannot reach it any more"
    assert on_machine(guard(steps), *T4, WHOLE, "#") == {"said": [lost, lost], "aside": {"GPU-1": lost}, "missing": {}}


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


def test_memory_of_no_visible_process_keeps_a_device_busy_only_if_it_was_in_use_from_the_start(
    on_machine: OnMachine,
) -> None:
    steps = f"look(1); look(1, {LESS}); look(1)"
    busy = "has 4 GiB of its memory in use, but no process on it is visible from here"
    assert on_machine(guard(steps, waits=True), *T4, WHOLE)["said"] == [None, None, None]
    free = f"(' {12 * GIB}\\n', ' {16 * GIB}\\n')"
    steps = f"look(1); look(1, {free}); look(1)"
    assert on_machine(guard(steps, waits=True), *T4, f"memory {16 * GIB} {12 * GIB}")["said"] == [busy, None, None]


SUPPLY = """
import json, os, pathlib, queue
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
submit()
lease = leases.get_nowait()
text = file.read_text()
file.write_text(text.replace("ecc 0 0", "ecc 1 1"))
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
        return on_machine(script, *T4, WHOLE, "ecc 0 0", PYTEST_ACCEL_LOCK_DIR=locks)

    assert run(False) == [None, False, None]
    assert run(True) == [
        None,
        True,
        "needs 1 cuda device; there is none to use\nGPU-1 was set aside: "
        "it has had an uncorrectable memory error (ECC) since its driver was loaded",
    ]


def test_a_lease_waits_for_the_killed_processes_of_the_last_one(on_machine: OnMachine, tmp_path: Path) -> None:
    code = f"""
submit()
lease = leases.get_nowait()
supply.broker("cuda").describe(lease.id, processes=[({KILLED}, 1.0)])
text = file.read_text()
file.write_text(text.replace(" {16 * GIB}\\n", " {12 * GIB}\\n") + "{LISTED}\\n")
supply.give_back("cuda", lease, killed=True)
request = submit()
waits = (leases.empty(), supply.obstacles("cuda", request))
file.write_text(text)
leases.get(timeout=60)
missing = supply.missing
supply.close()
print(json.dumps([*waits, missing]))
"""
    found = on_machine(
        (SUPPLY + code).replace("WAITS", "False"), *T4, WHOLE, PYTEST_ACCEL_LOCK_DIR=str(tmp_path / "locks")
    )
    assert found == [True, ["GPU-1 waits for its memory to be released"], []]


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
