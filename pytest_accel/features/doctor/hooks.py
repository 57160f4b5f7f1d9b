"""``--accel-info`` and the commands ``info`` and ``doctor``: the devices, and the findings, as text or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from pytest_accel.core.device import Device, is_private
from pytest_accel.core.stash_keys import SESSION
from pytest_accel.core.terminal_lines import write_line
from pytest_accel.core.units import count_text, format_capability, format_memory
from pytest_accel.features import commands
from pytest_accel.features.doctor.checks import check
from pytest_accel.hardware.health import Health, HealthVendor
from pytest_accel.hardware.inventory import Machine, describe
from pytest_accel.hardware.registry import VendorError
from pytest_accel.leases.demand import Holder
from pytest_accel.leases.locks import who_holds
from pytest_accel.leases.shared_folder import LockFolderError, default_folder
from pytest_accel.settings import options

FORMAT = 1
"""Version of the JSON document. Increased when a key is removed or changes its meaning, not when a key is added."""
_HEADS = ["#", "device", "id", "kind", "name", "memory", "free", "capability", "pci", "numa", "links"]
_HEADS += ["held by", "used by"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool:
    machine = session.config.stash[SESSION].own_machine
    write_line(session.config, table(machine, look(machine)))
    session.items = []
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def look(machine: Machine) -> dict[str, Any]:
    """Return the document that ``--json`` prints: docs/reference/command.md describes its keys.

    Nothing is written, and the lock folder is not created. Raise ValueError if ``--accel`` or another option does not
    fit the machine.
    """
    inventory = machine.session
    found: list[tuple[str, Device, Holder | None, Health | None]] = []
    mask: dict[str, str | None] = {}
    unknown = ""
    for one in (inventory, *map(machine.of, machine.resources)):
        if not one.devices:
            continue
        vendor = machine.vendor(one.kind)
        health = vendor.health(one.devices) if isinstance(vendor, HealthVendor) else {}
        holders: dict[str, Holder | None] = {}
        try:
            if not is_private(vendor):
                holders = {device.id: who_holds(default_folder(), device.id) for device in one.devices}
        except LockFolderError as error:
            unknown = f"the holders of leases are not known: {error}"
        mask |= vendor.mask(one.devices, os.environ)
        for name, device in zip(vendor.torch_devices(one.devices), one.devices, strict=True):
            found.append((name, device, holders.get(device.id), health.get(device.id)))
    numbers = {device.id: number for number, (_, device, _, _) in enumerate(found)}
    return {
        "format": FORMAT,
        "kind": inventory.kind,
        "order": inventory.order or None,
        "present": inventory.present,
        "visible": inventory.visible,
        "inherited": dict(inventory.inherited),
        "mask": mask,
        "notes": [*inventory.notes, *([unknown] if unknown else [])],
        "busy": list(inventory.busy),
        "devices": [_device(*one, numbers) for one in found],
    }


def _device(
    torch: str, device: Device, holder: Holder | None, health: Health | None, numbers: Mapping[str, int]
) -> dict[str, Any]:
    links = Counter((link.via, link.peer) for link in device.links).items()
    return {
        "number": numbers[device.id],
        "torch": torch,
        **{name: getattr(device, name) for name in ("id", "kind", "name", "memory", "memory_free")},
        "capability": format_capability(device.capability) if device.capability else None,
        **{name: getattr(device, name) for name in ("pci", "numa", "parent")},
        "cores": list(device.cores),
        "links": [{"peer": peer, "number": numbers.get(peer), "via": via, "count": n} for (via, peer), n in links],
        "holder": holder and {name: getattr(holder, name) for name in ("pid", "user", "test", "since")},
        "health": health and {"state": health.state, "reason": health.reason},
    }


def table(machine: Machine, document: Mapping[str, Any]) -> str:
    """Return `document` as text: a line about the session, a row for each device, the mask, and notes.

    Only the named resources that somebody holds have rows: memory alone may have 64 of them.
    """
    lines = [describe(machine.session)]
    rows = [_row(one) for one in document["devices"] if one["holder"] or one["kind"] == document["kind"]]
    if rows:
        cells = [_HEADS, *rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    mask = {name: value for name, value in document["mask"].items() if value is not None}
    lines += [f"mask of a process that sees all of them: {name}={value}" for name, value in mask.items()]
    return "\n".join([*lines, *document["notes"][len(machine.session.notes) :]])


def _row(one: Mapping[str, Any]) -> Sequence[str]:
    """Return the cells of a device; the links are those to other rows."""
    links: dict[str, list[int]] = {}
    for link in one["links"]:
        if link["number"] is not None:
            links.setdefault(link["via"], []).append(link["number"])
    via = "; ".join(f"{via}: {','.join(map(str, sorted(rows)))}" for via, rows in sorted(links.items()))
    holder, health = one["holder"], one["health"]
    held = used = ""
    if holder:
        since = time.strftime("since %Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        held = f"pid {holder['pid']}, {holder['user']}, {holder['test']}, {since}" if holder["pid"] else holder["test"]
    if health and health["state"] != "fine":
        used = "sick: " * (health["state"] == "sick") + health["reason"].removeprefix("is used by ")
    memory = [None if size is None else format_memory(size) for size in (one["memory"], one["memory_free"])]
    cells = [one[name] for name in ("number", "torch", "id", "kind", "name")]
    cells += [*memory, one["capability"], one["pci"], one["numa"], via, held, used]
    return ["-" if cell in (None, "") else str(cell) for cell in cells]


def _run(name: str, show: Callable[[options.Settings, bool], int], arguments: Sequence[str]) -> int:
    """Read the settings from the environment and `arguments`; return the status of `show`, or 1 for a broken vendor."""
    others = ", ".join(one for one in commands() if one not in COMMANDS)
    parser = argparse.ArgumentParser(
        f"python -m pytest_accel {name}",
        description="Show the devices that a session has, who holds them and who uses them (info, without a command), "
        "or look for what is wrong with the machine and say what to do (doctor).",
        epilog="Environment variables such as PYTEST_ACCEL count as they do for pytest; ini files are not read. "
        f"Other commands, each with a --help of its own: {others}.",
        allow_abbrev=False,
    )
    options.add_arguments(parser, (options.ACCEL, options.IDS, options.ORDER))
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args(arguments)
    try:
        return show(options.settings_without_pytest(given), given.json)
    except VendorError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except (pytest.UsageError, ValueError) as error:
        parser.error(str(error))


def _show_info(settings: options.Settings, as_json: bool) -> int:
    machine = options.machine_for(settings)
    document = look(machine)
    print(json.dumps(document, indent=2) if as_json else table(machine, document))
    return 0


def _show_findings(settings: options.Settings, as_json: bool) -> int:
    """Print a line for each finding with its advice below, and the counts at the end.

    docs/reference/command.md describes the keys of the JSON document.
    """
    findings = check(settings)
    problems, notes = (sum(one.state == state for one in findings) for state in ("problem", "note"))
    if as_json:
        entries = [{**one._asdict(), "advice": one.advice or None} for one in findings]
        print(json.dumps({"format": FORMAT, "problems": problems, "findings": entries}, indent=2))
        return 1 if problems else 0
    for one in findings:
        for head, text in ((f"{one.state:<9}{one.check:<10}", one.what), (" " * 19 + "-> ", one.advice)):
            if text:  # Long words such as paths and ids are not broken, so that they can be copied.
                wrapped = textwrap.wrap(text, 110 - len(head), break_long_words=False, break_on_hyphens=False)
                print(head + ("\n" + " " * len(head)).join(wrapped))
    print(f"{count_text(problems, 'problem')}, {count_text(notes, 'note')}")
    return 1 if problems else 0


COMMANDS = {
    "info": partial(_run, "info", _show_info),
    "doctor": partial(_run, "doctor", _show_findings),
}
