"""The input of a launcher (a job) and its output (a plan): data classes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pytest_accel.core.device import Device


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
