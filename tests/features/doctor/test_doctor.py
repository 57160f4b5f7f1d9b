"""Tests of ``python -m pytest_accel doctor``: the command on this machine with changed surroundings."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from pytest_accel.features.doctor.checks import _nvidia_cards
from pytest_accel.leases.shared_folder import VARIABLE
from tests.features.doctor.conftest import run
from tests.installed_packages import InstalledPackages

CHECKS = ["devices", "torch", "masks", "locks", "launcher"]
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
"""The variables of process 0 of two, each on a machine of its own."""
Findings = dict[str, list[tuple[str, str, str]]]


def findings_of(done: subprocess.CompletedProcess[str]) -> Findings:
    """Return state, text and advice of the findings by check."""
    document = json.loads(done.stdout)
    found: Findings = {}
    for one in document["findings"]:
        found.setdefault(one["check"], []).append((one["state"], one["what"], one["advice"] or ""))
    assert list(found) == CHECKS
    assert document["problems"] == sum(state == "problem" for results in found.values() for state, *_ in results)
    assert done.returncode == bool(document["problems"])
    return found


def test_the_command_finds_no_problem_on_this_machine_with_simulated_devices() -> None:
    done = run("doctor", "--accel", "sim:4")
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())  # Lines are wrapped, where depends on the length of paths.
    assert "ok devices the session has sim: 4 x sim ok" in text
    assert ("can be used" if Path(os.environ[VARIABLE]).exists() else "created by the first session") in text
    assert "ok launcher no launcher has started this process" in text
    assert re.search(r"0 problems, \d notes?$", text)
    assert max(map(len, done.stdout.splitlines())) <= 110
    assert done.stderr == ""


def test_a_problem_is_printed_and_sets_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locks").write_text("in the way")
    packages = InstalledPackages(tmp_path / "packages", monkeypatch)
    packages.install_vendor("broken", "toy = nothing_there:make")
    packages.install_vendor("one", "twin = os:getcwd")
    packages.install_vendor("other", "twin = os:getcwd")
    done = run(
        "doctor",
        "--json",
        "--accel=sim:2",
        PYTEST_ACCEL_LOCK_DIR=str(tmp_path / "locks"),
        SIM_VISIBLE_DEVICES="7",
        **MPIRUN,
    )
    found = findings_of(done)
    assert [result[:2] for result in found["locks"] + found["masks"]] == [
        ("problem", f"{tmp_path / 'locks'} is not a directory: no device can be leased"),
        ("problem", "SIM_VISIBLE_DEVICES='7' leaves none of 2 (sim)"),
    ]
    assert [result[:2] for result in found["launcher"]] == [("ok", "rank 0 of 2 under mpirun, 1 on this machine")]
    toy, twin = ((state, what) for state, what, _ in found["devices"] if what.startswith("kind "))
    assert (toy[0], twin[0]) == ("note", "note")
    assert "kind 'toy' of broken 1.0 cannot be loaded: ModuleNotFoundError" in toy[1]
    assert re.match(r"kind 'twin' of (one 1.0 and of other|other 1.0 and of one) 1.0: it can be", twin[1])


def test_variables_that_show_no_launcher_are_named() -> None:
    cases = {
        "RANK='0' do not show a launcher": {"RANK": "0"},
        "pass on all variables": {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"},
    }
    for text, variables in cases.items():
        done = run("doctor", "--json", "--accel", "none", **variables)
        ((state, what, advice),) = findings_of(done)["launcher"]
        assert text in f"{what} {advice}"
        assert state == "note"


def test_nvidia_gpus_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    devices = {"0000:01:00.0": ("0x10de", "0x030200"), "0000:02:00.0": ("0x10de", "0x030000")}
    devices |= {"0000:02:00.1": ("0x10de", "0x040300"), "0000:00:02.0": ("0x8086", "0x030000")}
    for address, (vendor, kind) in devices.items():
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert _nvidia_cards(tmp_path) == 2
