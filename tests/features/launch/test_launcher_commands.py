"""Tests of the masks and flags that are made for launchers, for devices that this machine does not have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_accel.core.device import Device
from pytest_accel.features.launch.launch_commands import LAUNCHERS, Job

GPUS = tuple(Device("cuda", f"GPU-{index}{index}", index, "H200") for index in (3, 1))
MASK = {"CUDA_VISIBLE_DEVICES": "GPU-33,GPU-11"}
ON_GPUS = Job(("/suite/trainer.py", "--epochs", "1"), 2, ("--more", "flags"), True, GPUS, MASK, MASK, "/folder", 12345)
LAUNCHERS_OF_PYTHON = ["torchrun", "accelerate", "deepspeed", "srun", "python"]


@pytest.mark.parametrize("launcher", LAUNCHERS_OF_PYTHON)
def test_no_launcher_gets_flags_that_bypass_the_mask(launcher: str) -> None:
    command, environ = LAUNCHERS[launcher].plan(ON_GPUS)
    words = " ".join(command)
    assert words.endswith(" /suite/trainer.py --epochs 1")
    assert words.index("--more flags") < words.index("/suite/trainer.py")
    assert not any(flag in words for flag in ("--num_gpus", "--include", "--exclude", "--virtual-local-rank"))
    assert "--gpu_ids" not in words or "--gpu_ids all" in words
    assert environ["CUDA_VISIBLE_DEVICES"] == ("1,3" if launcher == "deepspeed" else MASK["CUDA_VISIBLE_DEVICES"])


def test_deepspeed_gets_device_numbers_in_pci_order() -> None:
    _, environ = LAUNCHERS["deepspeed"].plan(ON_GPUS)
    assert environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_deepspeed_refuses_what_integers_cannot_select() -> None:
    parts = tuple(replace(gpu, id=f"MIG-{gpu.index}", parent=gpu.id) for gpu in GPUS)
    with pytest.raises(ValueError, match="which MIG instances do not have; the devices are MIG-3, MIG-1"):
        LAUNCHERS["deepspeed"].plan(ON_GPUS._replace(devices=parts))
    with pytest.raises(ValueError, match=r"nproc=4\): DeepSpeed starts one rank for each device that it sees"):
        LAUNCHERS["deepspeed"].plan(ON_GPUS._replace(nproc=4))


def test_a_mode_in_the_arguments_of_accelerate_replaces_the_default() -> None:
    assert "--multi_gpu" in LAUNCHERS["accelerate"].plan(ON_GPUS)[0]
    assert "--multi_gpu" not in LAUNCHERS["accelerate"].plan(ON_GPUS._replace(launcher_args=("--use_fsdp",)))[0]


def test_srun_stays_on_the_node_and_sets_the_mask_in_each_task() -> None:
    command, _ = LAUNCHERS["srun"].plan(ON_GPUS._replace(environ={**MASK, "SLURMD_NODENAME": "node7"}))
    assert command[1:4] == ("--ntasks=2", "--nodes=1", "--nodelist=node7")
    assert "env CUDA_VISIBLE_DEVICES=GPU-33,GPU-11 " in " ".join(command)
