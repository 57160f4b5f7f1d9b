"""Tests of sessions on a card of which other processes, or the session's own main process, use memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.conftest import Suite
from tests.installed_packages import InstalledPackages

VENDOR = """
import os
from pathlib import Path

from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.health import Facts, judge_all
from pytest_accel.hardware.vendors.sim import Sim

TOTAL = 16 << 30
USED = Path(os.environ["CARD_USERS"])  # A line for each process on the card: its pid and the bytes that it uses.


def users():
    lines = USED.read_text().splitlines() if USED.exists() else []
    return {int(pid): int(used) for pid, used in map(str.split, lines)}


class Card(Sim):
    def discover(self):
        from dataclasses import replace

        free = TOTAL - sum(users().values())
        return tuple(replace(device, kind="card", memory=TOTAL, memory_free=free) for device in super().discover())

    def health(self, devices, session=None):
        found = users()
        free = TOTAL - sum(found.values())
        return judge_all({device.id: Facts(found, memory_free=free) for device in devices}, session)


def make(argument):
    facts = KINDS["sim"]._replace(name="card")
    return Card(facts, "1,shared")  # Only devices that sessions share are checked before they are leased.
"""
TESTS = """
import os
import signal

import pytest
from tests.inner import hang_here, note

if "PYTEST_ACCEL_SESSION" not in os.environ:  # Not in ranks.
    note(os.environ["CARD_USERS"], os.getpid(), 524 << 20)

pytestmark = pytest.mark.devices(1)


@pytest.mark.distributed(1, init=False)
def test_is_killed():
    hang_here()
    signal.pause()


def test_passes(accel):
    assert len(accel.ids) == 1


def test_another_program_takes_memory():
    note(os.environ["CARD_USERS"], os.environ["OTHER_PROGRAM"], 6 << 30)
    os.kill(os.getpid(), signal.SIGKILL)


def test_passes_beside_it(accel):
    assert len(accel.ids) == 1
"""


def test_memory_in_use_by_living_processes_never_takes_a_card_away(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = InstalledPackages(tmp_path / "packages", monkeypatch)
    packages.install_vendor("card", "card = card_vendor:make", "card_vendor", VENDOR)
    users = tmp_path / "users.txt"
    monkeypatch.setenv("CARD_USERS", str(users))
    monkeypatch.setenv("OTHER_PROGRAM", "1")
    suite.without_torch()
    suite.plugin("tests.late_driver")
    suite.write("test_it.py", TESTS)
    run = suite.run("--accel=card", "--accel-wait=60")
    assert run.count() == {"FAILED": 2, "PASSED": 2}, run.text
    assert run.result("test_passes") == run.result("test_passes_beside_it") == "PASSED"
    assert "set aside" not in run.text
