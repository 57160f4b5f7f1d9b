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
    """The devices in the session's order."""
    mask: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables of a process that sees all these devices; None removes a variable."""
    notes: tuple[str, ...] = ()
    """Facts that could not be determined, as text, in addition to the inventory's notes."""
    resources: Mapping[str, Mapping[str, Holder | None]] = field(default_factory=dict)
    """For each named resource the ids of all that there are, with the holder of each."""


def look(machine: Machine) -> SessionFacts:
    """Return the facts of `machine`, without writing anything or creating the lock folder.

    Raise ValueError if ``--accel`` or another option does not fit the machine.
    """
    inventory = machine.session
    devices = inventory.devices
    notes: list[str] = []
    resources = {name: _holders(machine.of(name).devices, notes) for name in machine.resources}
    if not devices:
        return SessionFacts(inventory, notes=tuple(notes), resources=resources)
    vendor = machine.vendor(inventory.kind)
    health = vendor.health(devices) if isinstance(vendor, HealthVendor) else {}
    private = isinstance(vendor, PretendVendor) and not vendor.shared
    holders = {} if private else _holders(devices, notes)
    return SessionFacts(
        inventory,
        tuple(
            DeviceFacts(name, device, holders.get(device.id), health.get(device.id))
            for name, device in zip(vendor.torch_devices(devices), devices, strict=True)
        ),
        vendor.mask(devices, os.environ),
        tuple(dict.fromkeys(notes)),
        resources,
    )


def _holders(devices: Sequence[Device], notes: list[str]) -> dict[str, Holder | None]:
    """Return the holder of each device; if they cannot be found out, none of them, and add the reason to `notes`."""
    try:
        return {device.id: who_holds(default_folder(), device.id) for device in devices}
    except LockFolderError as error:
        notes.append(f"the holders of leases are not known: {error}")
        return dict.fromkeys(device.id for device in devices)


def table(facts: SessionFacts) -> str:
    """Return the text for the terminal: a header line, a row for each device, the mask, resources, and notes."""
    lines = [describe(facts.inventory)]
    if facts.devices:
        numbers = {one.device.id: number for number, one in enumerate(facts.devices)}
        heads = ("#", "device", "id", "kind", "name", "memory", "free", "capability", "pci", "numa", "links")
        rows = [(*heads, "held by", "used by"), *(_row(one, numbers) for one in facts.devices)]
        lines += _columns(rows)
    mask = {name: value for name, value in facts.mask.items() if value is not None}
    lines += [f"mask of a process that sees all of them: {name}={value}" for name, value in mask.items()]
    for name, holders in facts.resources.items():
        held: dict[str, list[str]] = {}
        for one, holder in holders.items():
            if holder is not None:
                held.setdefault(_holder_text(holder), []).append(one)
        texts = [f"{', '.join(ids)} held by {text}" for text, ids in held.items()]
        lines.append(f"resource {name}, {len(holders)}: {'; '.join(texts) or 'free'}")
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
        "resources": {
            name: {one: _holder_json(holder) for one, holder in holders.items()}
            for name, holders in facts.resources.items()
        },
    }


def _holder_json(holder: Holder | None) -> dict[str, object] | None:
    if holder is None:
        return None
    return {"pid": holder.pid, "user": holder.user, "test": holder.test, "since": holder.since}


def _device_json(number: int, facts: DeviceFacts, numbers: Mapping[str, int]) -> dict[str, object]:
    device, health = facts.device, facts.health
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
        "holder": _holder_json(facts.holder),
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
    if not holder.pid and holder.processes:
        return str(holder)
    if not holder.pid:
        return "a session that has not written its name yet"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    return f"pid {holder.pid}, {holder.user}, {holder.test}, since {since}"


def _users_text(health: Health | None) -> str:
    if health is None or health.state == "fine":
        return "-"
    return f"sick: {health.reason}" if health.state == "sick" else health.reason.removeprefix("is used by ")


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
