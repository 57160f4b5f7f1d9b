"""What is to be launched, and how that is done: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_accel.core.device import Device

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Job:
    """A script, and what it may use."""

    launcher: str
    script: str
    """An absolute path, or with `module` a module's name."""
    args: tuple[str, ...]
    nproc: int
    module: bool
    launcher_args: tuple[str, ...]
    """More for the launcher itself, after what it is told anyway."""
    kind: str
    """The kind of the leased devices; ``cpu`` where there are none."""
    accelerated: bool
    """Whether the devices are accelerators; False for CPU slots, pretend devices, and none."""
    devices: tuple[Device, ...]
    mask_variables: tuple[str, ...]
    """Those of the kind, outermost layer first."""
    environ: Mapping[str, str]
    """What the launched processes are to have, but for what the launcher needs."""
    python: str
    folder: str
    """An empty one, for what the launcher and its ranks write."""
    port: int
    """On this machine, held for the script's own rendezvous."""
    program: str = ""
    """For a launcher that is a program of its own: its path."""
    version: str = ""
    """What that program says with ``--version``."""

    @property
    def ranks_folder(self) -> str:
        """For what the launcher writes by rank."""
        return f"{self.folder}/ranks"

    @property
    def target(self) -> tuple[str, ...]:
        """The script and its arguments, as a launcher of Python scripts takes them."""
        return (*(("-m",) if self.module else ()), self.script, *self.args)


@dataclass(frozen=True, slots=True)
class Plan:
    """A command, and where the ranks' output will be."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    stdout: str
    """A pattern of the ranks' files, as paths below the job's folder; its group is the rank, or empty for rank 0."""
    stderr: str | None
    """None: what the ranks write there is in the other file as well."""
    depth: int | None = None
    """How many generations the one rank is below the launcher; None: a variable tells which processes are ranks."""
