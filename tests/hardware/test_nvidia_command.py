"""Tests of ``python -m pytest_accel`` on a machine with NVIDIA GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_accel.hardware.queries import versions
from tests.hardware.conftest import OnMachine, gpu

Findings = dict[str, list[tuple[str, str]]]
GIB = 1024**3

COMMAND = """
import sys
from pytest_accel.__main__ import main
main(ARGUMENTS)
assert not {"torch", "numpy"} & sys.modules.keys()
"""
DOCTOR = """
import json, sys
from pytest_accel.settings.options import Settings
from pytest_accel.features.doctor.checks import check
findings = check(Settings(accel=ACCEL, preload=("not_there",)))
assert not {"torch", "numpy"} & sys.modules.keys()
print(json.dumps([(one.check, one.state, one.what) for one in findings]))
"""


PAIR = ("driver 550.54.14 99040", *gpu(1, "capability 7 5", "nvlink 1"), *gpu(2, "capability 7 5"))


@pytest.fixture
def doctor(on_machine: OnMachine) -> Callable[..., Findings]:
    """Return a function that returns the doctor's findings on a machine by check."""

    def examine(*facts: str, accel: str = "auto", **environ: str) -> Findings:
        findings: Findings = {}
        for check, state, what in on_machine(DOCTOR.replace("ACCEL", repr(accel)), *facts, **environ):
            findings.setdefault(check, []).append((state, what))
        return findings

    return examine


def test_the_devices_are_printed_as_json(on_machine: OnMachine) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as user:
        facts = (
            *gpu(1, "nvlink 1"),
            *gpu(2, f"process {user.pid} {2 * GIB}"),
            *gpu(3, "ecc 4 4"),
        )
        info = on_machine(COMMAND.replace("ARGUMENTS", "['--json', '--accel-order', 'pci']"), *facts)
        user.kill()
    assert (info["kind"], info["order"], info["present"], info["visible"]) == ("cuda", "pci", 2, 2)
    assert info["notes"] == [
        "NVIDIA T4 (GPU-3) is left out: it has had 4 uncorrectable memory errors (ECC) since its driver was loaded"
    ]
    assert info["mask"] == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    first, second = info["devices"]
    assert (first["torch"], first["id"], first["memory_free"]) == ("cuda:0", "GPU-1", 15 * GIB)
    assert first["links"] == [{"peer": "GPU-2", "number": 1, "via": "nvlink", "count": 1}]
    assert first["health"] == {"state": "fine", "reason": ""}
    assert second["health"]["state"] == "busy"
    assert f"pid {user.pid} (" in second["health"]["reason"]


def test_the_doctor_finds_a_driver_that_answers(doctor: Callable[..., Findings]) -> None:
    findings = doctor(*PAIR)
    assert ("ok", "the session has cuda: 2 x NVIDIA T4 (16 GiB)") in findings["devices"]
    assert findings["masks"][0][0] == "ok"


@pytest.mark.skipif("cuda" in versions(), reason="torch is built for CUDA here")
def test_the_doctor_finds_a_torch_that_cannot_use_the_gpus(doctor: Callable[..., Findings]) -> None:
    ((state, what),) = doctor(*PAIR)["torch"]
    assert state == "problem"
    assert what.startswith("2 x NVIDIA T4 (16 GiB) (cuda) cannot be used: torch is not built for CUDA (torch ")
    ((state, what),) = doctor(*PAIR, accel="none")["torch"]
    assert state == "note"


def test_the_doctor_finds_a_driver_that_is_too_old_for_torch(doctor: Callable[..., Findings], tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda = '999.1'\n")
    ((state, what),) = doctor(*PAIR, PYTHONPATH=str(tmp_path))["torch"]
    assert state == "problem"
    assert what.endswith("built for cuda 999.1, and the driver supports CUDA 99.4 at most")


def test_the_doctor_finds_a_driver_that_does_not_answer(doctor: Callable[..., Findings]) -> None:
    findings = doctor("init 18")
    assert [state for state, _ in findings["devices"]] == ["ok", "problem"], "the problem is reported once"
    assert "the NVIDIA driver does not answer" in findings["devices"][1][1]
