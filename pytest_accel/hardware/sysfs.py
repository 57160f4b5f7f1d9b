"""Readers of the kernel's files about devices, below a folder `root` that contains ``sys``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


def nodes(folder: Path, patterns: Sequence[str]) -> list[tuple[int, str]]:
    """Return the files in `folder` whose paths match one of `patterns`: the number in its first group, and the name."""
    found: list[tuple[int, str]] = []
    for pattern in patterns:
        inner, _, name = pattern.rpartition("/")
        matching = ((file, re.fullmatch(name, file.name, re.ASCII)) for file in (folder / inner).glob("*"))
        found += [(int(match[1]), file.name) for file, match in matching if match and not file.is_dir()]
    return sorted(found)


def class_folder(root: Path, name: str) -> Path:
    """Return the folder of the node `name` in any class of sysfs; if there is none, a path that does not exist."""
    return next(iter(sorted((root / "sys/class").glob(f"*/{name}"))), root / "sys/class" / name)


def pci_address(root: Path, name: str) -> str | None:
    """Return the PCI address of the device with the node `name`, or in the IOMMU group `name`; None if it has none."""
    for link in (class_folder(root, name) / "device", *(root / "sys/kernel/iommu_groups" / name).glob("devices/*")):
        address = link.resolve().name
        if _PCI.fullmatch(address):
            return address
    return None


def read_text(file: Path) -> str:
    """Return the stripped text of `file`; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(file: Path) -> int | None:
    """Return the integer in `file`, decimal or, with ``0x``, hexadecimal; None if there is none."""
    try:
        return int(read_text(file), 0)
    except ValueError:
        return None


def numa_node(root: Path, pci: str | None) -> int | None:
    """Return the NUMA node of a PCI address; None if sysfs has none, or -1, as on a machine without NUMA nodes."""
    node = None if pci is None else read_number(root / "sys/bus/pci/devices" / pci / "numa_node")
    return node if node is not None and node >= 0 else None
