"""Tests of the masks and flags that are made for launchers, for devices that this machine does not have."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_accel.core.device import Device
from pytest_accel.features.launch.launch_commands import Job, find_program, plan

GPUS = tuple(Device("cuda", f"GPU-{index}{index}", index, "H200") for index in (3, 1))
MASK = {"CUDA_VISIBLE_DEVICES": "GPU-33,GPU-11"}
TARGET = ("/suite/trainer.py", "--epochs", "1")
ON_GPUS = Job(TARGET, 2, ("--more", "flags"), GPUS, tuple(MASK), {**MASK, "SLURMD_NODENAME": "node7"}, "/folder", 12345)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "deepspeed", "mpirun", "srun", "python"])
def test_no_launcher_gets_flags_that_bypass_the_mask(launcher: str) -> None:
    command, environ = plan(launcher, ON_GPUS)
    words = " ".join(command)
    assert words.endswith(" /suite/trainer.py --epochs 1")
    assert words.index("--more flags") < words.index("/suite/trainer.py")
    assert not any(flag in words for flag in ("--num_gpus", "--include", "--exclude", "--virtual-local-rank"))
    assert "--gpu_ids" not in words or "--gpu_ids all" in words
    assert environ["CUDA_VISIBLE_DEVICES"] == ("1,3" if launcher == "deepspeed" else MASK["CUDA_VISIBLE_DEVICES"])
    assert environ.get("CUDA_DEVICE_ORDER") == ("PCI_BUS_ID" if launcher == "deepspeed" else None)
    if launcher == "srun":  # Slurm sets its own mask for a step.
        assert "--ntasks=2 --nodes=1 --nodelist=node7 " in words
        assert "env CUDA_VISIBLE_DEVICES=GPU-33,GPU-11 " in words


def test_deepspeed_refuses_what_integers_cannot_select() -> None:
    parts = tuple(replace(gpu, id=f"MIG-{gpu.index}", parent=gpu.id) for gpu in GPUS)
    for job in (ON_GPUS._replace(devices=parts), ON_GPUS._replace(nproc=4)):
        with pytest.raises(ValueError, match="DeepSpeed starts one rank for each device of the test, and knows no MIG"):
            plan("deepspeed", job)


def test_a_mode_in_the_arguments_of_accelerate_replaces_the_default() -> None:
    assert "--multi_gpu" in plan("accelerate", ON_GPUS)[0]
    assert "--multi_gpu" not in plan("accelerate", ON_GPUS._replace(launcher_args=("--use_fsdp",)))[0]


def test_programs_beside_the_interpreter_come_before_those_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("venv/python", "venv/tool", "path/tool", "path/other"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_program("tool") == str(tmp_path / "venv" / "tool")
    assert find_program("other") == str(tmp_path / "path" / "other")
    assert find_program("absent") is None
