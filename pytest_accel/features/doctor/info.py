"""Shows the session's devices as a table or as JSON: ``pytest --accel-info`` and ``python -m pytest_accel``.

`look` gathers the facts once; `table` and `as_json` are pure functions of them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_accel.core.device import Device, Near, PretendVendor
from pytest_accel.core.units import format_capability, format_memory
from pytest_accel.hardware.health import Health, HealthVendor
from pytest_accel.hardware.inventory import Inventory, Machine, describe
from pytest_accel.leases.device_locks import who_holds
from pytest_accel.leases.holder import Holder
from pytest_accel.leases.shared_folder import LockFolderError, default_folder

FORMAT = 1
"""Version of the JSON document. Increased when a key is removed or changes its meaning, not when one is added."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device of the session, and its present users."""

    torch: str
    """The device's name in torch, in a process that sees all devices of the session."""
    device: Device
    holder: Holder | None = None
    """The session that holds the lease of the device; None if there is none, or it is not known."""
    health: Health | None = None
    """None if the vendor does not report it."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The devices of a session that starts now, and its notes. Made by `look`."""

    inventory: Inventory
    devices: tuple[DeviceFacts, ...] = ()
    """The devices in the session's order, and then the named resources."""
    mask: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables of a process that sees all these devices; None removes a variable."""
    notes: tuple[str, ...] = ()
    """Facts that could not be determined, as text, in addition to the inventory's notes."""


def look(machine: Machine) -> SessionFacts:
    """Return the facts of `machine`, without writing anything or creating the lock folder.

    Raise ValueError if ``--accel`` or another option does not fit the machine.
    """
    inventory = machine.session
    found: list[DeviceFacts] = []
    mask: dict[str, str | None] = {}
    notes: tuple[str, ...] = ()
    for one in (inventory, *map(machine.of, machine.resources)):
        devices = one.devices
        if not devices:
            continue
        vendor = machine.vendor(one.kind)
        health = vendor.health(devices) if isinstance(vendor, HealthVendor) else {}
        holders: dict[str, Holder | None] = {}
        try:
            if not isinstance(vendor, PretendVendor) or vendor.shared:
                holders = {device.id: who_holds(default_folder(), device.id) for device in devices}
        except LockFolderError as error:
            notes = (f"the holders of leases are not known: {error}",)
        mask |= vendor.mask(devices, os.environ)
        found += (
            DeviceFacts(name, device, holders.get(device.id), health.get(device.id))
            for name, device in zip(vendor.torch_devices(devices), devices, strict=True)
        )
    return SessionFacts(inventory, tuple(found), mask, notes)


def table(facts: SessionFacts) -> str:
    """Return the text for the terminal: a header line, a row for each device, the mask, and notes.

    Only the named resources that somebody holds have rows: memory alone may have 64 of them.
    """
    lines = [describe(facts.inventory)]
    shown = [one for one in facts.devices if one.holder is not None or one.device.kind == facts.inventory.kind]
    if shown:
        numbers = {one.device.id: number for number, one in enumerate(facts.devices)}
        heads = ("#", "device", "id", "kind", "name", "memory", "free", "capability", "pci", "numa", "links")
        rows = [(*heads, "held by", "used by"), *(_row(one, numbers) for one in shown)]
        lines += _columns(rows)
    mask = {name: value for name, value in facts.mask.items() if value is not None}
    lines += [f"mask of a process that sees all of them: {name}={value}" for name, value in mask.items()]
    return "\n".join([*lines, *facts.notes])


def as_json(facts: SessionFacts) -> dict[str, object]:
    """Return the document that ``--json`` prints. docs/reference/command.md describes its keys."""
    inventory = facts.inventory
    numbers = {one.device.id: number for number, one in enumerate(facts.devices)}
    return {
        "format": FORMAT,
        "kind": inventory.kind,
        "order": inventory.order or None,
        "present": inventory.present,
        "visible": inventory.visible,
        "inherited": dict(inventory.inherited),
        "mask": dict(facts.mask),
        "notes": [*inventory.notes, *facts.notes],
        "busy": list(inventory.busy),
        "devices": [_device_json(number, one, numbers) for number, one in enumerate(facts.devices)],
    }


def _device_json(number: int, facts: DeviceFacts, numbers: Mapping[str, int]) -> dict[str, object]:
    device, holder, health = facts.device, facts.holder, facts.health
    return {
        "number": number,
        "torch": facts.torch,
        "id": device.id,
        "kind": device.kind,
        "name": device.name,
        "memory": device.memory,
        "memory_free": device.memory_free,
        "capability": format_capability(device.capability) if device.capability else None,
        "pci": device.pci,
        "numa": device.numa,
        "parent": device.parent,
        "cores": list(device.cores),
        "links": [
            {"peer": peer, "number": numbers.get(peer), "via": via, "count": count}
            for (via, peer), count in _links(device).items()
        ],
        "holder": None
        if holder is None
        else {"pid": holder.pid, "user": holder.user, "test": holder.test, "since": holder.since},
        "health": None if health is None else {"state": health.state, "reason": health.reason},
    }


def _links(device: Device) -> Counter[tuple[Near, str]]:
    return Counter((link.via, link.peer) for link in device.links)


def _row(facts: DeviceFacts, numbers: Mapping[str, int]) -> tuple[str, ...]:
    device = facts.device
    return (
        str(numbers[device.id]),
        facts.torch,
        device.id,
        device.kind,
        device.name,
        format_memory(device.memory) if device.memory is not None else "-",
        format_memory(device.memory_free) if device.memory_free is not None else "-",
        format_capability(device.capability) if device.capability else "-",
        device.pci or "-",
        str(device.numa) if device.numa is not None else "-",
        _links_text(device, numbers),
        _holder_text(facts.holder),
        _users_text(facts.health),
    )


def _links_text(device: Device, numbers: Mapping[str, int]) -> str:
    """Return the linked devices by row number (``nvlink: 1,2; pcie: 3``), without peers that are not in the table."""
    peers: dict[str, list[int]] = {}
    for via, peer in _links(device):
        if peer in numbers:
            peers.setdefault(via, []).append(numbers[peer])
    return "; ".join(f"{via}: {','.join(map(str, sorted(rows)))}" for via, rows in sorted(peers.items())) or "-"


def _holder_text(holder: Holder | None) -> str:
    if holder is None:
        return "-"
    if not holder.pid:
        return str(holder)
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    return f"pid {holder.pid}, {holder.user}, {holder.test}, since {since}"


def _users_text(health: Health | None) -> str:
    if health is None or health.state == "fine":
        return "-"
    return f"sick: {health.reason}" if health.state == "sick" else health.reason.removeprefix("is used by ")


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
