"""Whether a launcher has started this process as one of many, by what it has put into the environment.

`RANK` and `WORLD_SIZE` alone are no launcher: many a person has them exported. Each launcher is known by what it alone
sets, read from torch 2.13 (`torch/distributed/elastic/agent/server/local_elastic_agent.py`), DeepSpeed 0.19
(`deepspeed/launcher/launch.py`), and the environment of processes under Open MPI 4.1, MPICH 4.0 and Slurm 22.05. Intel
MPI has MPICH's process manager, and is unverified.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outer:
    """A process of a world that a launcher has started."""

    launcher: str
    """As a person calls it."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    """How many of the processes are on this machine."""
    job: tuple[str, ...]
    """Values that the launcher gives to all processes of this start, on all machines, and to no others."""
    parent: str = ""
    """The process that started those of this machine, where the launcher gives nothing of the kind."""

    @property
    def about(self) -> str:
        """The world in a few words."""
        return f"{self.launcher}, {self.size} ranks"

    @property
    def key(self) -> str:
        """The job as a file name."""
        return hashlib.sha256("\0".join((self.launcher, *self.job, self.parent)).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Signs:
    """The variables of one launcher. All of them must be there, but for those of `job`."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]
    more: tuple[str, ...] = ()
    """What else it sets, and nobody else does."""


OWN_RUN = "accel-"
"""What `TORCHELASTIC_RUN_ID` begins with in ranks of this plugin, and in what they start."""
_ELASTIC_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_SIGNS = (
    _Signs(
        *("accelerate launch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        job=_ELASTIC_JOB,
        more=("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"),
    ),
    _Signs(
        *("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        job=_ELASTIC_JOB,
        more=("TORCHELASTIC_RUN_ID",),
    ),
    _Signs(
        *("deepspeed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        job=("MASTER_ADDR", "MASTER_PORT"),
        more=("CROSS_RANK", "CROSS_SIZE"),
    ),
    _Signs(
        *("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Signs("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", job=()),
    _Signs(
        *("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        more=("SLURM_STEP_ID",),
    ),
)
"""In this order: torchrun may have been started by srun, and mpirun in an allocation of Slurm's."""

_OF_A_RANK = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("LOCAL_SIZE", "NODE_RANK"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_MCA_pmix"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    }
)
_OF_A_RANK_TOO = (
    "TORCHELASTIC_",
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_",
    "PMI_",
    "PMIX_",
    "SLURM_STEP",
)


def find(environ: Mapping[str, str], parent: str) -> Outer | None:
    """The world that this process was started for; None where no launcher did, or for this process alone.

    `parent` tells the parent process from all others: one starts all of a job's processes on a machine.
    """
    for signs in _SIGNS:
        names = (signs.rank, signs.size, signs.local_rank, signs.local_size, *signs.more)
        if not all(environ.get(name) for name in names):
            continue
        if signs.job == _ELASTIC_JOB and environ["TORCHELASTIC_RUN_ID"].startswith(OWN_RUN):
            continue
        try:
            rank, size, local_rank = (int(environ[name]) for name in names[:3])
            local_size = _local_size(environ[signs.local_size], environ.get("SLURM_NODEID", "0"))
        except ValueError:
            continue
        job = tuple(environ[name] for name in signs.job if name in environ)
        started_by = "" if job else parent
        return Outer(signs.launcher, rank, size, local_rank, local_size, job, started_by) if size > 1 else None
    return None


def _local_size(text: str, node: str) -> int:
    """A number, or Slurm's list of them for all nodes: ``2(x3),1``."""
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        sizes += [int(match[1])] * int(match[2] or 1)
    return sizes[int(node)] if int(node) < len(sizes) else sizes[-1]


def of_a_rank(environ: Mapping[str, str]) -> list[str]:
    """The variables that make a process a rank: all launchers', since one may have been started by another."""
    return [name for name in environ if name in _OF_A_RANK or name.startswith(_OF_A_RANK_TOO)]


def without_local_rank(args: Sequence[str]) -> list[str]:
    """The command line without what DeepSpeed puts in front of it for old scripts (``--local_rank=1``)."""
    return [arg for arg in args if not re.fullmatch(r"--local[_-]rank=\d+", arg)]


def find_here() -> Outer | None:
    """The world that this process was started for; None in a worker of xdist."""
    if "PYTEST_XDIST_WORKER" in os.environ or find(os.environ, "") is None:
        return None
    from pytest_accel.core.kill import identity

    return find(os.environ, identity(os.getppid()))
