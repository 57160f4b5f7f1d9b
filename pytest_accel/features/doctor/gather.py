"""Gathers the doctor's facts without importing torch, initializing a device runtime or writing anything."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from pytest_accel.core.kinds import kinds
from pytest_accel.features.doctor.facts import Forks, Kind, LockFolder, MachineFacts, Nvidia, Torch
from pytest_accel.features.doctor.forks import try_forks
from pytest_accel.hardware.inventory import grouped
from pytest_accel.hardware.registry import VendorError, describe_kind, make_vendor
from pytest_accel.hardware.sysfs import read_text
from pytest_accel.hardware.torch_build import versions
from pytest_accel.hardware.vendors.cpu import cpu_slots
from pytest_accel.hardware.vendors.nvml import driver_installed, optional
from pytest_accel.leases.lock_dir import default_folder, folder_problem
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

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
