"""Tests of the command line and the environment that are made for each launcher."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import module_command
from pytest_accel.core.kinds import KINDS
from pytest_accel.features.launch.launch_commands import LAUNCHERS, Job, Plan

GPUS = tuple(Device("cuda", f"GPU-{index}{index}", index, "H200") for index in (3, 1))
ON_GPUS = Job(
    launcher="torchrun",
    script="/suite/trainer.py",
    args=("--epochs", "1"),
    nproc=2,
    module=False,
    launcher_args=(),
    kind="cuda",
    accelerated=True,
    devices=GPUS,
    mask_variables=KINDS["cuda"].masks,
    environ={"CUDA_VISIBLE_DEVICES": "GPU-33,GPU-11", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "MINE": "1"},
    python="/bin/python",
    folder="/folder",
    port=12345,
    program="/bin/mpirun",
)
ON_CPU = replace(ON_GPUS, kind="cpu", accelerated=False, devices=(), mask_variables=(), environ={"MINE": "1"})
OPEN_MPI = "mpirun (Open MPI) 4.1.4\n"
HYDRA = "HYDRA build details:\n    Version: 4.0.2\n"
TRAINER = ("/suite/trainer.py", "--epochs", "1")


def plan(launcher: str, job: Job = ON_GPUS, **changes: object) -> Plan:
    """Return the plan of `launcher` for `job` with `changes`."""
    return LAUNCHERS[launcher].plan(replace(job, launcher=launcher, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("job", [ON_GPUS, ON_CPU], ids=["gpus", "cpu"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script_and_its_arguments_come_last(launcher: str, job: Job) -> None:
    assert plan(launcher, job).command[-3:] == TRAINER
    assert plan(launcher, job).environ["MINE"] == "1"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_module_is_started_by_its_name(launcher: str) -> None:
    made = plan(launcher, script="package.trainer", module=True).command
    flag = "--module" if launcher == "deepspeed" else "-m"
    assert made[-4:] == (flag, "package.trainer", "--epochs", "1")


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name != "python"])
def test_launcher_arguments_come_before_the_script(launcher: str) -> None:
    made = plan(launcher, launcher_args=("--more", "flags")).command
    assert made.index("--more") < made.index("/suite/trainer.py")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_launcher_gets_flags_that_bypass_the_mask(launcher: str) -> None:
    made = plan(launcher)
    words = " ".join(made.command)
    assert not any(flag in words for flag in ("--num_gpus", "--include", "--exclude", "--virtual-local-rank"))
    assert "--gpu_ids" not in words or "--gpu_ids all" in words
    if launcher != "deepspeed":
        assert made.environ["CUDA_VISIBLE_DEVICES"] == "GPU-33,GPU-11"


def test_torchrun_chooses_its_port_itself() -> None:
    command = module_command("/bin/python", "torch.distributed.run")
    assert plan("torchrun").command[: len(command) + 5] == (
        *(*command, "--standalone", "--local-addr=127.0.0.1"),
        *("--nproc-per-node=2", "--redirects=3", "--log-dir=/folder/ranks"),
    )


def test_accelerate_starts_several_ranks_with_torchrun() -> None:
    made = plan("accelerate")
    assert "--multi_gpu" in made.command
    assert "--cpu" not in made.command
    assert (made.environ["PET_STANDALONE"], made.environ["PET_REDIRECTS"]) == ("1", "3")
    assert "ACCELERATE_USE_CPU" not in made.environ


def test_accelerate_is_told_to_use_the_cpu() -> None:
    many, one = plan("accelerate", ON_CPU), plan("accelerate", ON_CPU, nproc=1)
    assert "--multi_gpu" in many.command
    assert many.environ["ACCELERATE_USE_CPU"] == "true"
    assert "--multi_gpu" not in one.command
    assert "--cpu" in one.command
    assert one.depth == 1


def test_a_mode_in_the_arguments_of_accelerate_replaces_the_default() -> None:
    made = plan("accelerate", launcher_args=("--use_fsdp",)).command
    assert "--multi_gpu" not in made
    assert "--use_fsdp" in made


def test_deepspeed_gets_device_numbers_in_pci_order() -> None:
    made = plan("deepspeed")
    assert made.environ["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert made.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    port = made.command.index("--master_port")
    assert made.command[port + 1] == "12345"


def test_deepspeed_shows_no_gpu_to_ranks_on_the_cpu() -> None:
    made = plan("deepspeed", ON_CPU, environ={"CUDA_VISIBLE_DEVICES": ""}).environ
    assert made["DS_ACCELERATOR"] == "cpu"
    assert made["CUDA_VISIBLE_DEVICES"] == "1000,1001"
    assert int(made["LOCAL_SIZE"]) > 1001


def test_deepspeed_reads_the_masks_of_other_kinds() -> None:
    xpu = replace(ON_GPUS, kind="xpu", mask_variables=("ZE_AFFINITY_MASK",), environ={"ZE_AFFINITY_MASK": "0,2"})
    assert plan("deepspeed", xpu).environ == {"ZE_AFFINITY_MASK": "0,2"}
    with pytest.raises(ValueError, match=r"ZE_AFFINITY_MASK='0\.1,2': DeepSpeed accepts only integers"):
        plan("deepspeed", replace(xpu, environ={"ZE_AFFINITY_MASK": "0.1,2"}))


def test_deepspeed_cannot_name_mig_instances() -> None:
    parts = tuple(replace(gpu, id=f"MIG-{gpu.index}", parent=gpu.id) for gpu in GPUS)
    with pytest.raises(ValueError, match=r"MIG instances have none \(MIG-3, MIG-1\): use torchrun"):
        plan("deepspeed", devices=parts)


def test_deepspeed_starts_one_rank_for_each_device() -> None:
    with pytest.raises(ValueError, match=r"nproc=4\): DeepSpeed starts one rank for each .* allowed is nproc=2"):
        plan("deepspeed", nproc=4)


def test_command_of_open_mpi() -> None:
    made = plan("mpirun", version=OPEN_MPI)
    assert made.command == (
        *("/bin/mpirun", "--host", "localhost:2", "-n", "2", "--bind-to", "none"),
        *("--output-filename", "/folder/ranks:nocopy", "/bin/python", *TRAINER),
    )
    assert (made.environ["MASTER_ADDR"], made.environ["MASTER_PORT"]) == ("127.0.0.1", "12345")


def test_command_of_mpich_and_intel_mpi() -> None:
    made = plan("mpirun", version=HYDRA)
    assert made.command == (
        *("/bin/mpirun", "-launcher", "fork", "-hosts", "localhost", "-n", "2"),
        *("-outfile-pattern", "/folder/ranks/%r.out", "-errfile-pattern", "/folder/ranks/%r.err"),
        *("/bin/python", *TRAINER),
    )
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in made.environ


def test_srun_stays_on_the_node_and_sets_the_mask_in_each_task() -> None:
    made = plan("srun", program="/bin/srun", environ={**ON_GPUS.environ, "SLURMD_NODENAME": "node7"})
    assert made.command[:4] == ("/bin/srun", "--ntasks=2", "--nodes=1", "--nodelist=node7")
    assert made.command[-6:] == ("env", "CUDA_VISIBLE_DEVICES=GPU-33,GPU-11", "/bin/python", *TRAINER)
    assert "--output=/folder/ranks/%t.out" in made.command
    assert "env" not in plan("srun", ON_CPU).command
