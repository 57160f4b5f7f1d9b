"""Readers of the kernel's files about devices, below a folder `root` that contains ``sys``."""

from __future__ import annotations

import re
from pathlib import Path

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


def nodes(folder: Path, pattern: str) -> dict[int, str]:
    """Return the names in `folder` that match `pattern`, by the number in its first group; subfolders are ignored."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return {}
    matching = [(entry, match) for entry in entries if (match := re.fullmatch(pattern, entry.name, re.ASCII))]
    return {int(match[1]): entry.name for entry, match in matching if not entry.is_dir()}


def pci_address(root: Path, name: str) -> str | None:
    """Return the PCI address of the device with the node `name`, from any device class in sysfs, or None."""
    for link in sorted((root / "sys/class").glob(f"*/{name}/device")):
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
    """Return the NUMA node of a PCI address; None if sysfs has none (or -1: the machine has no NUMA nodes)."""
    node = None if pci is None else read_number(root / "sys/bus/pci/devices" / pci / "numa_node")
    return node if node is not None and node >= 0 else None
