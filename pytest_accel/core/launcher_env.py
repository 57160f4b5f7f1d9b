"""Detection, by environment variables, of a launcher that has started this process together with others.

`RANK` and `WORLD_SIZE` alone do not prove a launcher, because users may have exported them. Each launcher is recognized
by variables that only it sets. They were read in torch 2.13
(`torch/distributed/elastic/agent/server/local_elastic_agent.py`) and DeepSpeed 0.19 (`deepspeed/launcher/launch.py`),
and in processes under Open MPI 4.1, MPICH 4.0 and Slurm 22.05. Intel MPI uses MPICH's process manager; it was not
tried.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pytest_accel.core.stash_keys import is_xdist_worker


class LauncherEnv(NamedTuple):
    """This process's place in a world that a launcher has started, and the identity of that launch.

    A dataclass takes pytest's start a millisecond more to define.
    """

    launcher: str
    """Name of the launcher, for display."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    """Number of processes of this world on this machine."""
    job: tuple[str, ...]
    """Values that identify this launch: all its processes on all machines have them, and no other processes."""
    parent: str = ""
    """Process id of the parent of all processes of this machine, if `job` is empty; else empty."""

    @property
    def about(self) -> str:
        """Short description of the world, for display."""
        return f"{self.launcher}, {self.size} ranks"

    @property
    def key(self) -> str:
        """Identifier of the launch that can be part of a file name."""
        return hashlib.sha256("\0".join((self.launcher, *self.job, self.parent)).encode()).hexdigest()[:16]


class _LauncherVariables(NamedTuple):
    """Names of the variables that a launcher sets. Only the variables in `job` may be absent."""

    launcher: str
    names: tuple[str, ...]
    """Rank, size, local rank and local size, and further variables, which distinguish it from other launchers."""
    job: tuple[str, ...] = ()


OWN_RUN = "accel-"
"""Prefix of `TORCHELASTIC_RUN_ID` in ranks of this plugin and in processes that they start."""
_ELASTIC_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_ELASTIC_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
_OPEN_MPI = "OMPI_COMM_WORLD_"
_LAUNCHERS = (
    _LauncherVariables("accelerate launch", (*_ELASTIC_NAMES, "ACCELERATE_MIXED_PRECISION"), _ELASTIC_JOB),
    _LauncherVariables("torchrun", _ELASTIC_NAMES, _ELASTIC_JOB),
    _LauncherVariables(
        "deepspeed",
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        job=("MASTER_ADDR", "MASTER_PORT"),
    ),
    _LauncherVariables(
        "mpirun",
        tuple(f"{_OPEN_MPI}{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _LauncherVariables("mpirun", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    _LauncherVariables(
        "srun",
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
"""Innermost launcher first: srun may start torchrun, and mpirun may run in an allocation of Slurm."""

_RANK_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("LOCAL_SIZE", "NODE_RANK"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_MCA_pmix"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    }
)
_RANK_VARIABLE_PREFIXES = (
    "TORCHELASTIC_",
    _OPEN_MPI,
    "OMPI_UNIVERSE_",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_",
    "PMI_",
    "PMIX_",
    "SLURM_STEP",
)


def find(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Return this process's place in the world that the innermost launcher has started; None without one or peers."""
    first = next(recognized(environ), None)
    return first if first is not None and first.size > 1 else None


def recognized(environ: Mapping[str, str]) -> Iterator[LauncherEnv]:
    """Yield the place of this process in the world of each launcher that `environ` shows, the innermost launcher first.

    The parent process identifies the job on this machine if the launcher sets no variable that does, since one parent
    starts all processes of a job on a machine.
    """
    for variables in _LAUNCHERS:
        if not all(environ.get(name) for name in variables.names):
            continue
        if variables.job == _ELASTIC_JOB and environ["TORCHELASTIC_RUN_ID"].startswith(OWN_RUN):
            continue
        try:
            rank, size, local_rank = (_number(environ[name]) for name in variables.names[:3])
            local_size = _local_size(environ[variables.names[3]], environ.get("SLURM_NODEID", "0"))
        except ValueError:
            continue
        job = tuple(environ[name] for name in variables.job if name in environ)
        parent = "" if job else str(os.getppid())
        yield LauncherEnv(variables.launcher, rank, size, local_rank, local_size, job, parent)


def variables_here(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `environ` by which launchers are recognized, with their values."""
    return {name: environ[name] for variables in _LAUNCHERS for name in variables.names if name in environ}


def _local_size(text: str, node: str) -> int:
    """Return the number of processes on `node`. `text` is that number, or Slurm's list for all nodes: ``2(x3),1``."""
    size, before = 0, 0
    for part in text.split(","):
        match = re.fullmatch(r"([^(]+)(?:\(x([^)]+)\))?", part)
        if match is None:
            raise ValueError(text)
        size, before = _number(match[1]), before + _number(match[2] or "1")
        if _number(node) < before:
            break
    return size


def _number(text: str) -> int:
    """Return the number in a launcher's variable; raise ValueError if it is none, or if no launcher counts so far."""
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII):
        raise ValueError(text)
    return int(text)


def of_a_rank(environ: Mapping[str, str]) -> list[str]:
    """Return the variables in `environ` that make a process a rank.

    Variables of all launchers are included, since a launcher may have started another launcher.
    """
    return [name for name in environ if name in _RANK_VARIABLES or name.startswith(_RANK_VARIABLE_PREFIXES)]


def for_own_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ`, this process's environment, for ranks that this process starts.

    The variables of a launcher of this process are left out: the launcher has not started the ranks.
    """
    names = of_a_rank(environ) if find_here() is not None else ()
    return {name: value for name, value in environ.items() if name not in names}


def without_local_rank(args: Sequence[str]) -> list[str]:
    """Return `args` without the ``--local_rank=1`` that DeepSpeed adds for old scripts."""
    return [arg for arg in args if not re.fullmatch(r"--local[_-]rank=\d+", arg)]


def find_here() -> LauncherEnv | None:
    """Call :func:`find` with this process's environment, and return its result; None in an xdist worker."""
    return None if is_xdist_worker() else find(os.environ)
