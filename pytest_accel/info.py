"""The table of ``--accel-info``: the session's devices, in order, with their masks and who holds them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pytest_accel.hardware.device import Device
from pytest_accel.hardware.inventory import Machine, describe
from pytest_accel.hardware.units import format_memory
from pytest_accel.leases.locks import DeviceLocks, Holder


def table(machine: Machine) -> str:
    """The text of ``--accel-info``."""
    inventory = machine.session
    if not inventory.devices:
        return describe(inventory)
    locks = DeviceLocks()
    vendor = machine.vendor(inventory.kind)
    heads = ("device", "id", "name", "memory", "free", "capability", "pci", "held by")
    rows = [
        (name, *_facts(device), _held(locks.holder(device.id)))
        for name, device in zip(vendor.torch_devices(inventory.devices), inventory.devices, strict=True)
    ]
    mask = {name: value for name, value in vendor.mask(inventory.devices, os.environ).items() if value is not None}
    lines = [describe(inventory), *_columns([heads, *rows])]
    lines += [f"mask of a process that sees them all: {name}={value}" for name, value in mask.items()]
    return "\n".join(lines)


def _facts(device: Device) -> tuple[str, ...]:
    return (
        device.id,
        device.name,
        format_memory(device.memory) if device.memory is not None else "-",
        format_memory(device.memory_free) if device.memory_free is not None else "-",
        ".".join(map(str, device.capability)) if device.capability else "-",
        device.pci or "-",
    )


def _held(holder: Holder | None) -> str:
    if holder is None:
        return "-"
    since = time.strftime("%H:%M:%S", time.localtime(holder.since))
    return f"pid {holder.pid}, {holder.user}, {holder.test}, since {since}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
