"""Readers of the kernel's files about devices, below a folder `root` that contains ``sys``."""

from __future__ import annotations

from pathlib import Path


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
