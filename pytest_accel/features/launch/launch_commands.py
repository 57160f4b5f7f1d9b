"""From a launcher's job (a script and its resources) to its command line and environment.

The flags belong to torch 2.13 (``torch/distributed/run.py``), accelerate 1.15 (``commands/launch.py``), DeepSpeed
0.19 (``launcher/runner.py``), Open MPI 4.1, MPICH 4.0 and Intel MPI 2021.19 (their ``--help``), and Slurm 22.05
(srun(1)). The tests run all of them but Intel MPI.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import NO_CURRENT_FOLDER
from pytest_accel.features.launch import rank_program
from pytest_accel.messages.world_spec import LOOPBACK


class Job(NamedTuple):
    """A script to launch, and the resources that it may use."""

    target: tuple[str, ...]
    """The script and its arguments, as Python gets them: with ``-m`` before the name of a module."""
    nproc: int
    launcher_args: Sequence[str]
    devices: tuple[Device, ...]
    """The accelerators; empty for CPU slots and pretend devices."""
    masks: tuple[str, ...]
    """The names of the mask variables in `environ`."""
    environ: Mapping[str, str]
    folder: str
    """A folder for the output of the ranks, and for temporary files."""
    port: int
    """A port on this machine, reserved for the script's own rendezvous."""


Words = tuple[Sequence[str], Mapping[str, str], Sequence[str]]
"""Words before the user's arguments for the launcher; variables; words after them, if the launcher starts no Python."""


def find_program(name: str) -> str | None:
    """Return the path of the program `name`, or None if it is not installed.

    The folder of the running interpreter is searched before PATH: if its virtual environment is not activated, PATH
    does not include the programs of that environment.
    """
    beside = shutil.which(name, path=os.path.dirname(sys.executable)) if sys.executable else None
    return beside or shutil.which(name)


def _python(module: str) -> tuple[str, ...]:
    """Return the command that runs `module` as ``python -m`` does, but imports no module from the current folder."""
    if NO_CURRENT_FOLDER:
        return (sys.executable, *NO_CURRENT_FOLDER, "-m", module)
    source = f"import runpy, sys; del sys.path[0]; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return (sys.executable, "-c", source)


def plan(launcher: str, job: Job) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command line and the environment for `job` under `launcher`, one of `LAUNCHERS`."""
    before, variables, after = LAUNCHERS[launcher](job)
    command = (*before, *job.launcher_args, *after, rank_program.__file__, *job.target)
    # A launcher of any program has no rendezvous of its own for the script.
    rendezvous = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(job.port)} if after else {}
    return command, {**job.environ, **rendezvous, **variables, rank_program.FOLDER: job.folder}


def missing(launcher: str) -> str | None:
    """Return why `launcher`, one of `LAUNCHERS`, cannot be used here; None if it can."""
    package = {"torchrun": "torch", "accelerate": "accelerate", "deepspeed": "deepspeed"}.get(launcher)
    if package is not None and find_spec(package) is None:
        return f"launcher {launcher!r}: the package {package} is not installed"
    if launcher in ("mpirun", "srun") and find_program(launcher) is None:
        return f"launcher {launcher!r}: there is no {launcher} beside Python or on PATH"
    return None


def _torchrun(job: Job) -> Words:
    """With ``--standalone``, torchrun's agent opens the rendezvous store on a free port."""
    flags = ("--standalone", f"--local-addr={LOOPBACK}", f"--nproc-per-node={job.nproc}")
    return (*_python("torch.distributed.run"), *flags), {}, ()


def _accelerate(job: Job) -> Words:
    """For several processes accelerate uses torchrun, which reads from ``PET_*`` what accelerate has no flags for.

    With ``--main_process_port 0`` alone, accelerate would choose a port without keeping it reserved. ``--gpu_ids all``
    is the only value with which accelerate does not change the mask, whatever its configuration file says. ``--cpu``
    always starts one process; ``ACCELERATE_USE_CPU`` makes ranks use the CPU.
    """
    flags = f"--num_processes {job.nproc} --num_machines 1 --mixed_precision no --dynamo_backend no --gpu_ids all"
    words = [*_python("accelerate.commands.launch"), *flags.split(), "--main_process_port=0"]
    mode = "--multi_gpu" if job.nproc > 1 else "" if job.devices else "--cpu"
    if mode and {"--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--tpu", mode}.isdisjoint(job.launcher_args):
        words.append(mode)
    variables = {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": LOOPBACK}
    return words, variables if job.devices else {**variables, "ACCELERATE_USE_CPU": "true"}, ()


def _deepspeed(job: Job) -> Words:
    """The mask selects the slots: with ``--num_gpus`` or ``--include``, DeepSpeed would delete it.

    DeepSpeed reads the mask, converts the entries to integers, sorts them, and gives all ranks the resulting mask
    (``launcher/runner.py``, ``parse_node_config``). On the CPU it uses ``CUDA_VISIBLE_DEVICES``, too, and would show
    the first GPUs to ranks: there the mask has numbers that no GPU has. ``--hostfile`` names a file that does not
    exist, so that a host file of the machine is ignored. Rank 0 opens the reserved port.
    """
    flags = ("--hostfile", f"{job.folder}/none", "--master_port", str(job.port))
    words = (*_python("deepspeed.launcher.runner"), *flags)
    if not job.devices:
        slots = ",".join(map(str, range(1000, 1000 + job.nproc)))
        return words, {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": slots, "LOCAL_SIZE": "9999"}, ()
    if job.nproc != len(job.devices) or any(device.parent is not None for device in job.devices):
        why = "DeepSpeed starts one rank for each device of the test, and knows no MIG instances"
        raise ValueError(f"launch(launcher='deepspeed', nproc={job.nproc}): {why}")
    # With PCI_BUS_ID, CUDA numbers devices as the management library does, which is where `index` comes from.
    numbers = ",".join(map(str, sorted(device.index for device in job.devices)))
    variables = {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return words, variables if job.devices[0].kind == "cuda" else {}, ()


def _srun(job: Job) -> Words:
    """Start a step of the Slurm allocation, on this node, since the lease is on this node.

    ``env`` sets the mask again in each task: Slurm sets its own mask for a step that has devices of the allocation
    (srun(1); not verified, since the tests' Slurm has no devices).
    """
    node = job.environ.get("SLURMD_NODENAME")
    flags = (f"--ntasks={job.nproc}", "--nodes=1", *((f"--nodelist={node}",) if node else ()))
    words = (find_program("srun") or "srun", *flags, "--overlap", "--kill-on-bad-exit=1", "--export=ALL")
    masks = [f"{name}={job.environ[name]}" for name in job.masks if name in job.environ]
    return words, {}, ("env", *masks, sys.executable)


def mpirun(processes: int, folder: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the words and the variables with which ``mpirun`` starts `processes` processes on this machine.

    Open MPI, MPICH and Intel MPI have the flags in common. `localhost:N` allows N processes on any machine. Without
    binding, a rank's threads do not share one core. Each MPI ignores the variables of the others.
    """
    flags = ("--host", f"localhost:{processes}", "-n", str(processes), "--bind-to", "none")
    as_root = "OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"  # Tests in containers often run as root.
    local = "HYDRA_LAUNCHER I_MPI_HYDRA_BOOTSTRAP"  # In an allocation, Hydra would have Slurm start a process.
    # Open MPI 4 and 5 leave temporary files behind if they are killed.
    temporary = "OMPI_MCA_orte_tmpdir_base OMPI_MCA_btl_vader_backing_directory "
    temporary += "PRTE_MCA_prte_tmpdir_base OMPI_MCA_btl_sm_backing_directory"
    values = {as_root: "1", local: "fork", temporary: folder}
    variables = {name: value for names, value in values.items() for name in names.split()}
    return (find_program("mpirun") or "mpirun", *flags), variables


LAUNCHERS: Mapping[str, Callable[[Job], Words]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "mpirun": lambda job: (*mpirun(job.nproc, job.folder), (sys.executable,)),
    "srun": _srun,
    "python": lambda job: ((sys.executable,), {}, ()),
}
"""The launchers, by the names that `launch` accepts."""
