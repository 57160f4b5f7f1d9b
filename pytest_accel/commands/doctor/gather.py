"""Gathers the doctor's facts without importing torch, initializing a device runtime or writing anything."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from pytest_accel.commands.doctor.checks import SUPPORTED
from pytest_accel.commands.doctor.facts import Facts, Forks, Kind, LockFolder, Nvidia, Torch
from pytest_accel.commands.doctor.forks import try_forks
from pytest_accel.core.kinds import GROUP, kinds, published
from pytest_accel.hardware.health import HealthVendor, judge
from pytest_accel.hardware.inventory import grouped
from pytest_accel.hardware.registry import VendorError, describe_kind, make_vendor
from pytest_accel.hardware.torch_build import versions
from pytest_accel.hardware.vendors.cpu import cpu_slots
from pytest_accel.hardware.vendors.cuda_health import condition, driver_installed, optional
from pytest_accel.leases.lock_dir import default_folder, folder_problem
from pytest_accel.leases.wait_queue import wait_files
from pytest_accel.settings.machine import machine_for
from pytest_accel.settings.options import Settings

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
"""PCI base class of display controllers. GPUs without a display output are in it too (``0x0302``)."""
_ABANDONED = 60.0
"""Seconds after which a queue entry counts as abandoned: a session that waits touches its file twice a second."""


def gather(settings: Settings, forks: Callable[[Sequence[str]], Forks | None] = try_forks) -> Facts:
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
    modules = [name for name in settings.preload if name != "auto"]
    return Facts(
        accel=accel,
        session=session,
        devices=devices,
        ranks=ranks,
        python=platform.python_version(),
        versions={name: _version(name) for name in SUPPORTED},
        torch=torch,
        nvidia=look_for_nvidia(),
        kinds=tuple(look_for(kind, machine.argument(kind)) for kind in kinds()),
        cuda_order=os.environ.get("CUDA_DEVICE_ORDER"),
        forks=forks(modules) if torch is not None else None,
        locks=look_at_locks(default_folder()),
        shared_memory=_size(Path("/dev/shm")),
        ignored=_ignored(),
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
        _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY)
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
        sick: list[tuple[str, str]] = []
        for index in range(optional(pynvml, pynvml.nvmlDeviceGetCount) or 0):
            handle = optional(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)
            uuid = optional(pynvml, pynvml.nvmlDeviceGetUUID, handle) if handle is not None else None
            if uuid is not None and (health := judge(condition(pynvml, handle))).state == "sick":
                sick.append((uuid, health.reason))
        return Nvidia(
            cards,
            library=True,
            version=optional(pynvml, pynvml.nvmlSystemGetDriverVersion),
            # In the format of cuDriverGetVersion: 12040 is CUDA 12.4 (NVML reference, system queries).
            cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
            sick=tuple(sick),
        )
    finally:
        pynvml.nvmlShutdown()


def look_for(kind: str, argument: str | None) -> Kind:
    """Return the facts about `kind`, with the `argument` that follows its colon in ``--accel``."""
    own = kind not in published()
    try:
        vendor = make_vendor(kind, argument)
    except VendorError as error:
        return Kind(kind, published=not own, error=str(error))
    except ValueError as error:
        # The kind needs an argument in --accel, and has none here. This is not an error.
        return Kind(kind, published=not own, notes=(str(error),))
    inherited = {name: os.environ[name] for name in vendor.mask_variables if name in os.environ}
    try:
        present = vendor.discover()
        visible = vendor.visible(present, os.environ)
        return Kind(
            kind,
            hardware=vendor.hardware,
            published=not own,
            present=present,
            visible=visible,
            inherited=inherited,
            lacking=vendor.lacking(),
            notes=tuple(vendor.notes),
            health=vendor.health(visible) if isinstance(vendor, HealthVendor) else {},
        )
    except Exception as error:
        # Another package's vendor code may raise anything. The other facts are still needed.
        why = f"{describe_kind(kind)}: its devices cannot be looked up: {type(error).__name__}: {error}"
        return Kind(kind, vendor.hardware, not own, inherited=inherited, error=why)


def look_at_locks(folder: Path, mounts: Path = Path("/proc/mounts")) -> LockFolder:
    """Return the state of the lock folder. `mounts` is the file that lists the mounted file systems."""
    existing = folder
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    filesystem = filesystem_of(Path(os.path.realpath(existing)), _text(mounts))
    if existing == folder:
        return LockFolder(str(folder), True, folder_problem(folder), filesystem, _abandoned(folder))
    if existing != folder.parent:
        return LockFolder(str(folder), False, f"cannot be created, because {folder.parent} does not exist", filesystem)
    problem = _unusable(existing.resolve())
    why = None if problem is None else f"cannot be created, because {existing} {problem}"
    return LockFolder(str(folder), False, why, filesystem)


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


def _unusable(folder: Path) -> str | None:
    if folder.is_symlink() or not folder.is_dir():
        return "is not a directory" + (" (a symbolic link is none)" if folder.is_symlink() else "")
    return None if os.access(folder, os.W_OK | os.X_OK) else "is not writable for this user"


def _abandoned(folder: Path) -> int:
    count = 0
    with suppress(OSError):
        for file in wait_files(folder):
            with suppress(OSError):
                count += time.time() - file.lstat().st_mtime > _ABANDONED
    return count


def _ignored() -> tuple[str, ...]:
    points = [point for point in metadata.entry_points(group=GROUP) if point.name not in published()]
    return tuple(
        f"{point.name!r} of {f'{point.dist.name} {point.dist.version}' if point.dist is not None else point.value}"
        for point in points
    )


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


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
