"""From a launcher's job (a script and its resources) to its command line and environment.

The flags are those of torch 2.13 (``torch/distributed/run.py``), accelerate 1.15 (``commands/launch.py``), DeepSpeed
0.19 (``launcher/runner.py``), Open MPI 4.1 and MPICH 4.0 (their ``--help``), and Slurm 22.05 (srun(1)): the versions
that the tests run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import find_program, module_command
from pytest_accel.core.role import LOOPBACK
from pytest_accel.features.launch import rank_program


class Job(NamedTuple):
    """A script to launch, and the resources that it may use."""

    target: tuple[str, ...]
    """The script and its arguments, as Python gets them: with ``-m`` before the name of a module."""
    nproc: int
    launcher_args: Sequence[str]
    accelerated: bool
    """True if the devices are accelerators; False for CPU slots, pretend devices, and no devices."""
    devices: tuple[Device, ...]
    masks: Mapping[str, str]
    """The mask variables in `environ`."""
    environ: Mapping[str, str]
    folder: str
    """A folder for the output of the ranks, and for temporary files."""
    port: int
    """A port on this machine, reserved for the script's own rendezvous."""


Words = tuple[Sequence[str], Mapping[str, str], Sequence[str]]
"""Words before the user's arguments for the launcher; variables; words after them, if the launcher starts no Python."""


class Launcher(NamedTuple):
    """A launcher: its words for a job, the package that it needs, and possible names of its program."""

    words: Callable[[Job], Words]
    package: str | None = None
    programs: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """The path of the launcher's program; empty if it has none, or if none is installed."""
        return next((found for name in self.programs if (found := find_program(name))), "")

    def plan(self, job: Job) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the command line and the environment for `job`."""
        before, variables, after = self.words(job)
        command = (*before, *job.launcher_args, *after, rank_program.__file__, *job.target)
        return command, {**job.environ, **variables, rank_program.FOLDER: job.folder}


def missing(launcher: str) -> str | None:
    """Return why `launcher`, one of `LAUNCHERS`, cannot be used here; None if it can."""
    wanted = LAUNCHERS[launcher]
    if wanted.package is not None and importlib.util.find_spec(wanted.package) is None:
        return f"launcher {launcher!r}: the package {wanted.package} is not installed"
    if wanted.programs and not wanted.program:
        return f"launcher {launcher!r}: there is no {' or '.join(wanted.programs)} beside Python or on PATH"
    return None


def _torchrun(job: Job) -> Words:
    """With ``--standalone``, torchrun's agent opens the rendezvous store on a free port."""
    flags = ("--standalone", f"--local-addr={LOOPBACK}", f"--nproc-per-node={job.nproc}")
    return (*module_command(sys.executable, "torch.distributed.run"), *flags), {}, ()


def _accelerate(job: Job) -> Words:
    """For several processes accelerate uses torchrun, which reads from ``PET_*`` what accelerate has no flags for.

    With ``--main_process_port 0`` alone, accelerate would choose a port without keeping it reserved. ``--gpu_ids all``
    is the only value with which accelerate does not change the mask, whatever its configuration file says. ``--cpu``
    always starts one process; ``ACCELERATE_USE_CPU`` makes ranks use the CPU.
    """
    flags = f"--num_processes {job.nproc} --num_machines 1 --mixed_precision no --dynamo_backend no --gpu_ids all"
    words = [*module_command(sys.executable, "accelerate.commands.launch"), *flags.split(), "--main_process_port=0"]
    mode = "--multi_gpu" if job.nproc > 1 else "" if job.accelerated else "--cpu"
    modes = {"--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--tpu", "--multi_gpu", "--cpu"}
    if mode and modes.isdisjoint(job.launcher_args):
        words.append(mode)
    elastic = {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": LOOPBACK} if job.nproc > 1 else {}
    return words, elastic if job.accelerated else {**elastic, "ACCELERATE_USE_CPU": "true"}, ()


def _deepspeed(job: Job) -> Words:
    """The mask selects the slots: with ``--num_gpus`` or ``--include``, DeepSpeed would delete it.

    DeepSpeed reads the mask, converts the entries to integers, sorts them, and gives all ranks the resulting mask
    (``launcher/runner.py``, ``parse_node_config``). On the CPU it uses ``CUDA_VISIBLE_DEVICES``, too, and would show
    the first GPUs to ranks: there the mask has numbers that no GPU has. ``--hostfile`` names a file that does not
    exist, so that a host file of the machine is ignored. Rank 0 opens the reserved port.
    """
    flags = ("--hostfile", f"{job.folder}/none", "--master_port", str(job.port))
    words = (*module_command(sys.executable, "deepspeed.launcher.runner"), *flags)
    if not job.accelerated:
        slots = [str(slot) for slot in range(1000, 1000 + job.nproc)]
        return words, {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ",".join(slots), "LOCAL_SIZE": "9999"}, ()
    if job.nproc != len(job.devices) or any(device.parent is not None for device in job.devices):
        raise ValueError(
            f"launch(launcher='deepspeed', nproc={job.nproc}): DeepSpeed starts one rank for each device that it sees, "
            f"by an integer, which MIG instances do not have; the devices are {', '.join(d.id for d in job.devices)}"
        )
    if job.devices[0].kind != "cuda":
        return words, {}, ()
    # With PCI_BUS_ID, CUDA numbers devices as the management library does, which is where `index` comes from.
    numbers = map(str, sorted(device.index for device in job.devices))
    return words, {"CUDA_VISIBLE_DEVICES": ",".join(numbers), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ()


def _mpirun(job: Job) -> Words:
    program = LAUNCHERS["mpirun"].program
    variables = {**_rendezvous(job), **AS_ROOT, **mpi_folders(job.folder)}
    return (program, *mpi_flags(program, job.nproc)), variables, (sys.executable,)


def _srun(job: Job) -> Words:
    """Start a step of the Slurm allocation, on this node, since the lease is on this node.

    ``env`` sets the mask again in each task: Slurm sets its own mask for a step that has devices of the allocation
    (srun(1); not verified, since the tests' Slurm has no devices).
    """
    node = job.environ.get("SLURMD_NODENAME")
    flags = (f"--ntasks={job.nproc}", "--nodes=1", *((f"--nodelist={node}",) if node else ()))
    words = (LAUNCHERS["srun"].program, *flags, "--overlap", "--kill-on-bad-exit=1", "--export=ALL")
    return words, _rendezvous(job), ("env", *(f"{name}={mask}" for name, mask in job.masks.items()), sys.executable)


def _rendezvous(job: Job) -> dict[str, str]:
    """Return the variables that tell the script the reserved port; its launcher has no rendezvous of its own."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(job.port)}


AS_ROOT: Mapping[str, str] = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI refuses to run as root without these; tests in containers often run as root. Others ignore them."""


@cache
def mpi_flags(program: str, processes: int) -> tuple[str, ...]:
    """Return the flags with which ``mpirun``, the file `program`, starts `processes` processes on this machine."""
    command, environ, count = [program, "--version"], {**os.environ, **AS_ROOT}, str(processes)
    version = subprocess.run(command, env=environ, capture_output=True, encoding="utf-8", check=False, timeout=30)
    # For example `mpirun (Open MPI) 4.1.4`; other builds print `OpenRTE` or `PRRTE`.
    if any(name in version.stdout for name in ("Open MPI", "OpenRTE", "PRRTE")):
        # `localhost:N` allows N processes on any machine. Without binding, a rank's threads do not share one core.
        return ("--host", f"localhost:{count}", "-n", count, "--bind-to", "none")
    return ("-launcher", "fork", "-hosts", "localhost", "-n", count)  # Hydra: MPICH, Intel MPI.


def mpi_folders(folder: str) -> dict[str, str]:
    """Return variables that make Open MPI 4 and 5 put temporary files into `folder`, since a kill leaves them behind.

    Other MPI libraries ignore the variables.
    """
    names: tuple[str, ...] = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
    names += ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
    return dict.fromkeys(names, folder)


LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": Launcher(_torchrun, package="torch"),
    "accelerate": Launcher(_accelerate, package="accelerate"),
    "deepspeed": Launcher(_deepspeed, package="deepspeed"),
    "mpirun": Launcher(_mpirun, programs=("mpirun", "mpiexec")),
    "srun": Launcher(_srun, programs=("srun",)),
    "python": Launcher(lambda job: ((sys.executable,), {}, ())),
}
"""The launchers, by the names that `launch` accepts."""
