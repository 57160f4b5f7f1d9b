"""From a launcher's job (a script and its resources) to its plan (command line and environment): pure functions.

The flags are those of torch 2.13 (``torch/distributed/run.py``), accelerate 1.15 (``commands/launch.py``), DeepSpeed
0.19 (``launcher/runner.py``), Open MPI 4.1 and MPICH 4.0 (their ``--help``), and Slurm 22.05 (srun(1)): the versions
that the tests run.

A launcher that is a module runs by `module_command`, since its command (``torchrun``) does not search the current
folder for modules either. Its ranks are new interpreters without the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import module_command
from pytest_accel.core.role import LOOPBACK


@dataclass(frozen=True, slots=True)
class Job:
    """A script to launch, and the resources that it may use."""

    launcher: str
    script: str
    """An absolute path, or a module's name if `module` is True."""
    args: tuple[str, ...]
    nproc: int
    module: bool
    launcher_args: tuple[str, ...]
    """Extra arguments for the launcher itself, after those of its plan."""
    kind: str
    """The kind of the leased devices; ``cpu`` if there are none."""
    accelerated: bool
    """True if the devices are accelerators; False for CPU slots, pretend devices, and no devices."""
    devices: tuple[Device, ...]
    mask_variables: tuple[str, ...]
    """The mask variables of the kind, outermost layer first."""
    environ: Mapping[str, str]
    """The environment of the launched processes, without the variables that the launcher needs."""
    python: str
    folder: str
    """An empty folder for the output of the launcher and its ranks."""
    port: int
    """A port on this machine, reserved for the script's own rendezvous."""
    program: str = ""
    """The launcher's path, if it is a program of its own and not a Python module."""
    version: str = ""
    """The output of that program with ``--version``."""

    @property
    def ranks_folder(self) -> str:
        """The folder for the output that the launcher writes for each rank."""
        return f"{self.folder}/ranks"

    @property
    def target(self) -> tuple[str, ...]:
        """The script and its arguments, in the form for a launcher of Python scripts."""
        return (*(("-m",) if self.module else ()), self.script, *self.args)


@dataclass(frozen=True, slots=True)
class Plan:
    """The command for a job, and the places of the ranks' output."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    stdout: str
    """A regular expression for the ranks' files, as paths below the job's folder; group 1 is the rank, empty for 0."""
    stderr: str | None
    """Like `stdout`; None if both streams of a rank are in one file."""
    depth: int | None = None
    """The number of generations between the launcher and its only rank; None: an environment variable marks ranks."""


_FIRST_CPU_SLOT = 1000
"""A number larger than that of any accelerator."""


def visible_slots(job: Job) -> dict[str, str]:
    """Return the variables that make DeepSpeed start one rank for each of the job's devices.

    Without a flag that selects devices, DeepSpeed reads the mask of its accelerator, converts the entries to integers,
    sorts them, and gives all ranks the resulting mask (``launcher/runner.py``, ``parse_node_config``).

    DeepSpeed's CPU accelerator uses ``CUDA_VISIBLE_DEVICES``, too, and would show the first GPUs to CPU ranks. So the
    mask for CPU ranks has numbers that no GPU has. ``LOCAL_SIZE`` is the number of slots of the machine
    (``accelerator/cpu_accelerator.py``).

    Raise ValueError if the devices cannot be named by integers, or if there is not one device for each rank.
    """
    if not job.accelerated:
        slots = range(_FIRST_CPU_SLOT, _FIRST_CPU_SLOT + job.nproc)
        return {
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, slots)),
            "LOCAL_SIZE": str(slots.stop),
        }
    if job.nproc != len(job.devices):
        raise ValueError(
            f"launch(launcher='deepspeed', nproc={job.nproc}): DeepSpeed starts one rank for each device that it sees, "
            f"and the test has {len(job.devices)}; allowed is nproc={len(job.devices)}"
        )
    if job.kind == "cuda":
        parts = [device.id for device in job.devices if device.parent is not None]
        if parts:
            raise ValueError(
                f"launch(launcher='deepspeed'): DeepSpeed selects devices by integers, and MIG instances have none "
                f"({', '.join(parts)}): use torchrun"
            )
        # With PCI_BUS_ID, CUDA numbers devices as the management library does, which is where `index` comes from.
        numbers = ",".join(str(device.index) for device in sorted(job.devices, key=lambda device: device.index))
        return {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if job.kind == "rocm":
        # HIP's own mask, if set, wins over DeepSpeed's. If it is not set, DeepSpeed's numbers count within ROCR's mask.
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(job.devices))))}
    name = next((name for name in job.mask_variables if name in job.environ), None)
    mask = "" if name is None else job.environ[name]
    if name is not None and not all(entry.strip().isdecimal() for entry in mask.split(",")):
        raise ValueError(
            f"launch(launcher='deepspeed'): {name}={mask!r}: DeepSpeed accepts only integers with commas between them"
        )
    return {}


_OWN_STDOUT = r"launcher\.out()"
_OWN_STDERR = r"launcher\.err()"
"""The files of the launcher's own streams, which its only rank shares."""
_ELASTIC = r"ranks/.+/attempt_\d+/(\d+)/std{}\.log"
"""The files that the agent of torchrun writes for a rank."""
_BY_NUMBER = r"ranks/(\d+)\.{}"
"""The files of a launcher that is given a pattern for them."""
_ACCELERATE_MODES = {"--use_deepspeed", "--use_fsdp", "--use_megatron_lm", "--tpu", "--multi_gpu"}


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher: how to find it, and how to plan a job with it."""

    plan: Callable[[Job], Plan]
    package: str | None = None
    """The Python package that must be importable."""
    programs: tuple[str, ...] = ()
    """Possible names of the program; the first that is found is used."""
    many: bool = True
    """True if the launcher can start more than one process."""


def python(job: Job) -> Plan:
    """Return the plan for one process without a launcher."""
    return Plan((job.python, *job.target), job.environ, _OWN_STDOUT, _OWN_STDERR, depth=0)


def torchrun(job: Job) -> Plan:
    """Return the plan for torchrun. With ``--standalone``, its agent opens the rendezvous store on a free port."""
    command = (
        *module_command(job.python, "torch.distributed.run"),
        *("--standalone", f"--local-addr={LOOPBACK}", f"--nproc-per-node={job.nproc}"),
        *("--redirects=3", f"--log-dir={job.ranks_folder}"),
        *job.launcher_args,
        *job.target,
    )
    return Plan(command, job.environ, _ELASTIC.format("out"), _ELASTIC.format("err"))


def accelerate(job: Job) -> Plan:
    """Return the plan for accelerate.

    For several processes accelerate uses torchrun, which reads from ``PET_*`` variables the settings for which
    accelerate has no flags. With ``--main_process_port 0`` alone, accelerate would choose a port without keeping it
    reserved. ``--gpu_ids all`` is the only value with which accelerate does not change the mask, whatever its
    configuration file says. ``--cpu`` always starts one process; ``ACCELERATE_USE_CPU`` makes ranks use the CPU.
    """
    many = job.nproc > 1
    cpu = not job.accelerated
    command = [*module_command(job.python, "accelerate.commands.launch")]
    command += [
        "--num_processes",
        str(job.nproc),
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--gpu_ids",
        "all",
    ]
    command += ["--main_process_port", "0"]
    environ = dict(job.environ)
    if cpu:
        environ["ACCELERATE_USE_CPU"] = "true"
    if many:
        command += ["--log_dir", job.ranks_folder]
        environ |= {"PET_STANDALONE": "1", "PET_LOCAL_ADDR": LOOPBACK, "PET_REDIRECTS": "3"}
        if _ACCELERATE_MODES.isdisjoint(job.launcher_args):
            command.append("--multi_gpu")
    elif cpu and _ACCELERATE_MODES.isdisjoint(job.launcher_args):
        command.append("--cpu")
    command += [*job.launcher_args, *job.target]
    if many:
        return Plan(tuple(command), environ, _ELASTIC.format("out"), _ELASTIC.format("err"))
    return Plan(tuple(command), environ, _OWN_STDOUT, _OWN_STDERR, depth=1)


def deepspeed(job: Job) -> Plan:
    """Return the plan for DeepSpeed.

    The mask selects the slots: with ``--num_gpus`` or ``--include``, DeepSpeed would delete it. DeepSpeed has no
    rendezvous of its own: rank 0 opens the reserved port. Both streams of a rank go to one file. ``--hostfile`` names a
    file that does not exist, so that a host file of the machine is ignored: the lease is on this machine only.
    """
    command = (
        *module_command(job.python, "deepspeed.launcher.runner"),
        *("--hostfile", f"{job.folder}/none"),
        *("--master_port", str(job.port), "--enable_each_rank_log", job.ranks_folder),
        *job.launcher_args,
        *(("--module",) if job.module else ()),
        *(job.script, *job.args),
    )
    return Plan(command, {**job.environ, **visible_slots(job)}, r"ranks/\d+_rank(\d+)\.log", None)


def mpirun(job: Job) -> Plan:
    """Return the plan for Open MPI's mpirun, or for Hydra (MPICH, Intel MPI).

    ``MASTER_PORT`` tells the script the reserved port.
    """
    environ = {**job.environ, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(job.port)}
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
    """Return the flags with which ``mpirun`` of that `version` starts `processes` processes on this machine."""
    count = str(processes)
    if is_open_mpi(version):
        # `localhost:N` allows N processes on any machine. Without binding, a rank's threads do not share one core.
        return ["--host", f"localhost:{count}", "-n", count, "--bind-to", "none"]
    return ["-launcher", "fork", "-hosts", "localhost", "-n", count]


AS_ROOT: Mapping[str, str] = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Open MPI refuses to run as root without these; tests in containers often run as root."""


def mpi_folders(folder: str) -> dict[str, str]:
    """Return variables that make Open MPI 4 and 5 put temporary files into `folder`, since a kill leaves them behind.

    Other MPI libraries ignore the variables.
    """
    names: tuple[str, ...] = ("OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
    names += ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
    return dict.fromkeys(names, folder)


def srun(job: Job) -> Plan:
    """Return the plan for a step of the Slurm allocation, on this node, since the lease is on this node.

    ``env`` sets the mask again in each task: Slurm sets its own mask for a step that has devices of the allocation
    (srun(1); not verified, since the tests' Slurm has no devices).
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
    environ = {**job.environ, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(job.port)}
    return Plan(command, environ, _BY_NUMBER.format("out"), _BY_NUMBER.format("err"))


LAUNCHERS: Mapping[str, Launcher] = {
    "torchrun": Launcher(torchrun, package="torch"),
    "accelerate": Launcher(accelerate, package="accelerate"),
    "deepspeed": Launcher(deepspeed, package="deepspeed"),
    "mpirun": Launcher(mpirun, programs=("mpirun", "mpiexec")),
    "srun": Launcher(srun, programs=("srun",)),
    "python": Launcher(python, many=False),
}
"""The launchers, by the names that `launch` accepts."""


def is_open_mpi(version: str) -> bool:
    """Return True if the output of ``mpirun --version`` is Open MPI's.

    For example ``mpirun (Open MPI) 4.1.4``; other builds print ``OpenRTE`` or ``PRRTE``.
    """
    return any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE"))
