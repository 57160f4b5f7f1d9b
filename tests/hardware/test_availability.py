"""Tests of devices that are unavailable for a while, and of those that are set aside for the rest of the session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pytest_accel.core.device import Device
from pytest_accel.hardware.health import Facts, Guard, Health, judge_all

GIB = 1024**3
T4 = ("gpu GPU-1", "name NVIDIA T4", "pci ff00 1 0")
WHOLE = f"memory {16 * GIB} {16 * GIB}"


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
KILLED = 4194305  # Larger than any pid of Linux, so that no process has it.


def test_a_device_waits_for_the_memory_of_a_killed_process() -> None:
    card = ScriptedCard()
    card.guard.suspect(["GPU-1"], [KILLED])
    assert [card.look(99, 12, (KILLED, 4)), card.look(2, 12, (KILLED, 4))] == [WAITING, WAITING]
    assert [card.look(1, 16), card.look(1, 12)] == [None, None]
    assert card.guard.aside == {}


def test_a_device_whose_memory_is_not_released_is_leased_after_a_while() -> None:
    card, killed = ScriptedCard(), (KILLED, 4)
    card.guard.suspect(["GPU-1"], [KILLED])
    assert [card.look(99, 12, killed), card.look(4.9, 12, killed), card.look(0.2, 12, killed)] == [WAITING] * 2 + [None]


def test_processes_that_are_alive_are_not_waited_for() -> None:
    """The processes are the session's main process, one that it has started, and one of another program."""
    card, other = ScriptedCard(), os.getppid()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        card.guard.suspect(["GPU-1"], [KILLED])
        assert card.look(0, 12, (os.getpid(), 1), (worker.pid, 1), (other, 2)) is None
        worker.communicate()
    assert card.guard.aside == {}


def test_if_the_driver_lists_no_process_missing_memory_is_waited_for_once() -> None:
    card = ScriptedCard()
    card.guard.suspect(["GPU-1"], [KILLED])
    assert [card.look(99, 12), card.look(4.9, 14), card.look(0.2, 14)] == [WAITING] * 2 + [None]
    # The same if some are of another pid namespace.
    card.guard.suspect(["GPU-1"], [KILLED])
    assert card.look(1, 12, (KILLED + 1, 4)) == WAITING
    assert card.look(5, 14) is None
    # The second time, the same memory is missing, and nothing is waited for.
    card.guard.suspect(["GPU-1"], [KILLED])
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
    machine.write_text("\n".join([*T4, WHOLE, f"process {os.getpid()} {2 * GIB}"]))
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
