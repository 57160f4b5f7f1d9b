"""Each launcher's command line and environment, as a pure function of the job.

The flags are those of torch 2.13 (``torch/distributed/run.py``), accelerate 1.15 (``commands/launch.py``), DeepSpeed
0.19 (``launcher/runner.py``), Open MPI 4.1 and MPICH 4.0 (their ``--help``) and Slurm 22.05
(srun(1)), which the tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_accel.launch.deepspeed import visible_slots
from pytest_accel.launch.job import HOST, Job, Plan

_OWN_STDOUT = r"launcher\.out()"
_OWN_STDERR = r"launcher\.err()"
"""The launcher's streams are those of its one rank."""
_ELASTIC = r"ranks/.+/attempt_\d+/(\d+)/std{}\.log"
_BY_NUMBER = r"ranks/(\d+)\.{}"
_ACCELERATE_MODES = {"--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--tpu", "--multi_gpu"}


@dataclass(frozen=True, slots=True)
class Launcher:
    """How one launcher is found and used."""

    plan: Callable[[Job], Plan]
    package: str | None = None
    """What must be importable."""
    programs: tuple[str, ...] = ()
    """Names of the program, of which the first on the path is taken."""
    many: bool = True
    """Whether it starts more than one process."""


def python(job: Job) -> Plan:
    """One process, and no launcher."""
    return Plan((job.python, *job.target), job.environ, _OWN_STDOUT, _OWN_STDERR, depth=0)


def torchrun(job: Job) -> Plan:
    """The rendezvous is a store that the agent opens on port 0 and keeps (``--standalone``)."""
    command = (
        *(job.python, "-m", "torch.distributed.run"),
        *("--standalone", f"--local-addr={HOST}", f"--nproc-per-node={job.nproc}"),
        *("--redirects=3", f"--log-dir={job.ranks_folder}"),
        *job.launcher_args,
        *job.target,
    )
    return Plan(command, job.environ, _ELASTIC.format("out"), _ELASTIC.format("err"))


def accelerate(job: Job) -> Plan:
    """Several processes are torchrun's, which takes from ``PET_*`` what accelerate has no flags for.

    ``--main_process_port 0`` alone would have accelerate pick a port and let go of it. ``--gpu_ids all`` is the one
    value with which accelerate leaves the mask alone, whatever its configuration file says. ``--cpu`` starts one
    process, however many were asked for; what makes ranks use the CPU is ``ACCELERATE_USE_CPU``.
    """
    many = job.nproc > 1
    cpu = not job.accelerated
    command = [job.python, "-m", "accelerate.commands.launch", "--num_processes", str(job.nproc)]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--gpu_ids", "all"]
    command += ["--main_process_port", "0"]
    environ = dict(job.environ)
    if cpu:
        environ["ACCELERATE_USE_CPU"] = "true"
    if many:
        command += ["--log_dir", job.ranks_folder]
        environ |= {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": HOST, "PET_REDIRECTS": "3"}
        if _ACCELERATE_MODES.isdisjoint(job.launcher_args):
            command.append("--multi_gpu")
    elif cpu and _ACCELERATE_MODES.isdisjoint(job.launcher_args):
        command.append("--cpu")
    command += [*job.launcher_args, *job.target]
    if many:
        return Plan(tuple(command), environ, _ELASTIC.format("out"), _ELASTIC.format("err"))
    return Plan(tuple(command), environ, _OWN_STDOUT, _OWN_STDERR, depth=1)


def deepspeed(job: Job) -> Plan:
    """The mask says which slots: with ``--num_gpus`` or ``--include``, DeepSpeed would delete it.

    It has no rendezvous of its own: rank 0 opens the held port. It writes both streams of a rank to one file. A host
    file of the machine is kept out, since the lease is of this machine.
    """
    command = (
        *(job.python, "-m", "deepspeed.launcher.runner", "--hostfile", f"{job.folder}/none"),
        *("--master_port", str(job.port), "--enable_each_rank_log", job.ranks_folder),
        *job.launcher_args,
        *(("--module",) if job.module else ()),
        *(job.script, *job.args),
    )
    return Plan(command, {**job.environ, **visible_slots(job)}, r"ranks/\d+_rank(\d+)\.log", None)


def mpirun(job: Job) -> Plan:
    """Open MPI's, or Hydra: MPICH's and Intel MPI's. The script finds the held port in ``MASTER_PORT``."""
    environ = {**job.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(job.port)}
    flags = mpi_flags(job.version, job.nproc)
    if is_open_mpi(job.version):
        environ |= AS_ROOT
        flags += ["--output-filename", f"{job.ranks_folder}:nocopy"]
        patterns = (r"ranks/.+/rank\.(\d+)/stdout", r"ranks/.+/rank\.(\d+)/stderr")
    else:
        flags += ["-outfile-pattern", f"{job.ranks_folder}/%r.out", "-errfile-pattern", f"{job.ranks_folder}/%r.err"]
        patterns = (_BY_NUMBER.format("out"), _BY_NUMBER.format("err"))
    command = (job.program, *flags, *job.launcher_args, job.python, *job.target)
    return Plan(command, environ, *patterns)


def mpi_flags(version: str, processes: int) -> list[str]:
    """How ``mpirun`` of that `version` is told to start `processes` on this machine."""
    count = str(processes)
    if is_open_mpi(version):
        # Slots on localhost: as many as asked for, on any machine. Threads of ranks that are bound to one core each
        # would share it.
        return ["--host", f"localhost:{count}", "-n", count, "--bind-to", "none"]
    return ["-launcher", "fork", "-hosts", "localhost", "-n", count]


AS_ROOT: Mapping[str, str] = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI is refused to root, who runs tests in containers."""


def mpi_folders(folder: str) -> dict[str, str]:
    """Has Open MPI 4 and 5 keep in `folder` what it leaves behind when it is killed; others pay no heed."""
    names: tuple[str, ...] = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
    names += ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
    return dict.fromkeys(names, folder)


def srun(job: Job) -> Plan:
    """A step of the allocation, on this node, since the lease is of this machine.

    ``env`` sets the mask once more in each task: Slurm sets its own for a step that has devices of the allocation
    (srun(1), unverified: the tests' Slurm has none).
    """
    node = job.environ.get("SLURMD_NODENAME")
    masks = [f"{name}={job.environ[name]}" for name in job.mask_variables if name in job.environ]
    command = (
        *(job.program, f"--ntasks={job.nproc}", "--nodes=1", *((f"--nodelist={node}",) if node else ())),
        *("--overlap", "--kill-on-bad-exit=1", "--export=ALL"),
        *(f"--output={job.ranks_folder}/%t.out", f"--error={job.ranks_folder}/%t.err"),
        *job.launcher_args,
        *(("env", *masks) if masks else ()),
        *(job.python, *job.target),
    )
    environ = {**job.environ, "MASTER_ADDR": HOST, "MASTER_PORT": str(job.port)}
    return Plan(command, environ, _BY_NUMBER.format("out"), _BY_NUMBER.format("err"))


LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": Launcher(torchrun, package="torch"),
    "accelerate": Launcher(accelerate, package="accelerate"),
    "deepspeed": Launcher(deepspeed, package="deepspeed"),
    "mpirun": Launcher(mpirun, programs=("mpirun", "mpiexec")),
    "srun": Launcher(srun, programs=("srun",)),
    "python": Launcher(python, many=False),
}
"""By the names that `launch` takes."""


def is_open_mpi(version: str) -> bool:
    """Whether ``mpirun --version`` is Open MPI's: ``mpirun (Open MPI) 4.1.4``, or under another name ``OpenRTE``."""
    return any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE"))
