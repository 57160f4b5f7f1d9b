"""The facts about a machine and its software that the doctor judges.

They are gathered without importing torch, initializing a device runtime or writing anything. Only a temporary process
imports the fork server's modules, to see whether ranks can be forked.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.kinds import kinds
from pytest_accel.features.doctor.network import LauncherFacts, NetworkFacts, look_at_launch, look_at_network
from pytest_accel.hardware.inventory import grouped
from pytest_accel.hardware.registry import VendorError, describe_kind, make_vendor
from pytest_accel.hardware.sysfs import read_text
from pytest_accel.hardware.torch_build import versions
from pytest_accel.hardware.vendors.cpu import cpu_slots
from pytest_accel.hardware.vendors.nvml import driver_installed, optional
from pytest_accel.leases.shared_folder import default_folder, folder_problem
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed torch, determined without importing it."""

    version: str
    builds: Mapping[str, str] = field(default_factory=dict)
    """Versions of ``cuda``, ``hip`` and ``xpu`` that it was built for; empty if it was built for the CPU alone."""


@dataclass(frozen=True, slots=True)
class Nvidia:
    """State of NVIDIA's driver, according to its management library (NVML)."""

    cards: int = 0
    """Number of NVIDIA GPUs that sysfs shows on the PCI bus, with or without a driver."""
    library: bool = False
    """True if ``libnvidia-ml.so.1`` can be loaded."""
    error: str | None = None
    """Why the driver does not answer; None if it does."""
    version: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA version that the driver supports: major and minor."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of device on this machine, according to its vendor module."""

    name: str
    present: tuple[Device, ...] = ()
    visible: tuple[Device, ...] = ()
    """The devices that the inherited masks leave."""
    inherited: Mapping[str, str] = field(default_factory=dict)
    """Name and value of the kind's mask variables that are set."""
    lacking: str | None = None
    """The part that torch lacks to use the kind, as text; None if it lacks nothing."""
    error: str | None = None
    """Why the kind cannot be used; None if it can."""


@dataclass(frozen=True, slots=True)
class Forks:
    """Result of importing the modules of the fork server in a temporary process."""

    outcome: Literal["fit", "unfit", "failed", "ended", "hung"]
    """`unfit`: ranks must not be forked from the process. `ended`: an import ended the process."""
    name: str = ""
    """The module that was being imported."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LockFolder:
    """The folder of the machine's device locks, which the doctor does not create."""

    path: str
    exists: bool = True
    problem: str | None = None
    """Why the folder cannot be used, as the rest of a sentence after the path: ``is not a directory``."""
    filesystem: str | None = None
    """Type of its file system as in ``/proc/mounts``; None if unknown."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All facts that the checks use. Made by `gather`."""

    accel: str
    """The name in ``--accel``: ``auto``, ``none`` or a kind."""
    session: str
    """The kind of the session's devices; ``none`` if it has none."""
    devices: str
    """The session's devices as text; empty if it has none."""
    ranks: int
    """The number of ranks that may run at once."""
    torch: Torch | None
    nvidia: Nvidia
    kinds: tuple[Kind, ...]
    forks: Forks | None
    """None if torch is not installed."""
    locks: LockFolder
    launch: LauncherFacts
    network: NetworkFacts
    shared_memory: int | None
    """Size of ``/dev/shm`` in bytes; None on a system without it."""

    def kind(self, name: str) -> Kind | None:
        """Return the kind called `name`; None if it was not inspected."""
        return next((kind for kind in self.kinds if kind.name == name), None)


PLUGINS = "pytest's plugins"
_TIMEOUT = 120.0
"""Seconds for all imports. Torch alone may take 30 s from a network drive if it is not cached."""


def try_forks(modules: Sequence[str], timeout: float = _TIMEOUT) -> Forks:
    """Import `modules` after those of every fork server in a temporary process; return the result."""
    # This process owns the folder, because the other one may be killed before it could remove it.
    with tempfile.TemporaryDirectory(prefix="accel-doctor-") as folder:
        return _try_forks([folder, *modules], timeout)


def _try_forks(arguments: Sequence[str], timeout: float) -> Forks:
    # Use os._exit: threads that an import has started may keep the interpreter from exiting.
    source = f"import os, {__name__} as forks; forks.import_and_report(); os._exit(0)"
    with subprocess.Popen(
        python_command(source, *arguments, path=sys.path),
        env={**os.environ, "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "1")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
            hung = False
        except subprocess.TimeoutExpired as error:
            output, hung = error.output or b"", True
        finally:
            # Kill processes that an import has started: they hold the pipe open, and would leak.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return conclude(output.decode(errors="replace").splitlines(), process.returncode, timeout if hung else None)


def conclude(lines: Sequence[str], status: int, hung: float | None = None) -> Forks:
    """Return the result from the process's `lines` and exit status; `hung` is the timeout if it was killed.

    Messages are lines of JSON. Other lines are ignored: a `sitecustomize` module may print when the process starts.
    """
    name = "pytest_accel"
    for line in lines:
        message: Any = None
        with suppress(ValueError):
            message = json.loads(line)
        match message:
            case {"outcome": str()}:
                return Forks(**message)
            case {"importing": str(name)}:
                pass
    if hung is not None:
        return Forks("hung", name, f"{hung:g} seconds")
    return Forks("ended", name, f"signal {-status}" if status < 0 else f"exit status {status}")


def import_and_report() -> None:
    """Run in the temporary process: print a JSON line for each import and one for the outcome.

    Its arguments are a folder in which to load pytest's plugins, and the names of more modules.
    """
    folder, *modules = sys.argv[1:]
    # Imported modules may print: give them stderr as stdout.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(**message: str) -> None:
        print(json.dumps(message), file=output, flush=True)

    report(importing="pytest_accel.forkserver.preload")
    from pytest_accel.forkserver.preload import RANK_MODULES, TORCH_MODULES, load_plugins, unfit

    steps: list[tuple[str, Callable[[], object]]] = [
        (name, partial(importlib.import_module, name)) for name in (*RANK_MODULES, *TORCH_MODULES, *modules)
    ]
    steps.append((PLUGINS, partial(load_plugins, folder)))
    for name, step in steps:
        report(importing=name)
        try:
            step()
        except BaseException as error:
            report(outcome="failed", name=name, detail=f"{type(error).__name__}: {error}")
            return
        if (reason := unfit()) is not None:
            report(outcome="unfit", name=name, detail=reason)
            return
    report(outcome="fit")


_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""PCI base class of display controllers. GPUs without a display output are in it too (``0x0302``)."""


def gather(settings: Settings, forks: Callable[[Sequence[str]], Forks | None] = try_forks) -> MachineFacts:
    """Return the facts for a session with `settings`. Raise ValueError if a setting does not fit the machine.

    `forks` is called with the names of the modules to preload. It takes most of the time: some seconds.
    """
    machine = machine_for(settings)
    accel = settings.accel.strip().partition(":")[0]
    try:
        inventory = machine.session
        session, devices = inventory.kind, grouped(inventory.devices)
        ranks = len(inventory.devices) or cpu_slots()
    except VendorError:
        # `look_for` below reports the error of this kind.
        session, devices, ranks = "none", "", cpu_slots()
    torch = installed_torch()
    return MachineFacts(
        accel=accel,
        session=session,
        devices=devices,
        ranks=ranks,
        torch=torch,
        nvidia=look_for_nvidia(),
        kinds=tuple(look_for(kind, machine.argument(kind)) for kind in kinds()),
        forks=forks(() if settings.preload == "none" else settings.preload) if torch is not None else None,
        locks=look_at_locks(default_folder()),
        launch=look_at_launch(),
        network=look_at_network(),
        shared_memory=_size(Path("/dev/shm")),
    )


def installed_torch() -> Torch | None:
    """Return the installed torch; None if there is none to import."""
    try:
        if importlib.util.find_spec("torch") is None:
            return None
    except (ImportError, ValueError):
        return None
    return Torch(_version("torch") or "of unknown version", versions())


def look_for_nvidia(root: Path = Path("/")) -> Nvidia:
    """Return the state of NVIDIA's driver and of its GPUs. `root` is the folder that contains ``sys``."""
    cards = sum(
        read_text(device / "vendor") == _NVIDIA and read_text(device / "class").startswith(_DISPLAY)
        for device in (root / "sys/bus/pci/devices").glob("*")
    )
    if not driver_installed():
        return Nvidia(cards)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Nvidia(cards, library=True, error=str(error))
    try:
        cuda = optional(pynvml, pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return Nvidia(
            cards,
            library=True,
            version=optional(pynvml, pynvml.nvmlSystemGetDriverVersion),
            # In the format of cuDriverGetVersion: 12040 is CUDA 12.4 (NVML reference, system queries).
            cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
        )
    finally:
        pynvml.nvmlShutdown()


def look_for(kind: str, argument: str | None) -> Kind:
    """Return the facts about `kind`, with the `argument` that follows its colon in ``--accel``."""
    try:
        vendor = make_vendor(kind, argument)
    except VendorError as error:
        return Kind(kind, error=str(error))
    except ValueError:
        # The kind needs an argument in --accel, and has none here. This is not an error.
        return Kind(kind)
    inherited = {name: os.environ[name] for name in vendor.mask_variables if name in os.environ}
    try:
        present = vendor.discover()
        return Kind(kind, present, vendor.visible(present, os.environ), inherited, vendor.lacking())
    except Exception as error:
        # Another package's vendor code may raise anything. The other facts are still needed.
        why = f"{describe_kind(kind)}: its devices cannot be looked up: {type(error).__name__}: {error}"
        return Kind(kind, inherited=inherited, error=why)


def look_at_locks(folder: Path, mounts: Path = Path("/proc/mounts")) -> LockFolder:
    """Return the state of the lock folder. `mounts` is the file that lists the mounted file systems."""
    exists, problem = os.path.lexists(folder), None
    if exists:
        problem = folder_problem(folder)
    elif not (folder.parent.is_dir() and os.access(folder.parent, os.W_OK | os.X_OK)):
        problem = f"cannot be created, because {folder.parent} is not a directory that this user may write to"
    return LockFolder(str(folder), exists, problem, filesystem_of(Path(os.path.realpath(folder)), read_text(mounts)))


def filesystem_of(path: Path, mounts: str) -> str | None:
    """Return the type of the file system of `path` (no symbolic links), from the text of ``/proc/mounts``."""
    best, found = -1, None
    for line in mounts.splitlines():
        words = line.split()
        if len(words) > 2:
            # Blanks in paths are escaped in octal (fstab(5)).
            point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[1]))
            # A later mount on the same mount point hides the earlier one.
            if (point == path or point in path.parents) and len(point.parts) >= best:
                best, found = len(point.parts), words[2]
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _size(folder: Path) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        figures = os.statvfs(folder)
    except OSError:
        return 0
    return figures.f_blocks * figures.f_frsize
