"""Kinds whose devices are nodes under ``/dev``, and whose masks list the numbers of devices.

The `index` of such a device is the number that masks use. It is part of the device, so a rank can read and write masks
without inspecting the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import pick_numbers, read_numbers, write_numbers
from pytest_accel.hardware.sysfs import numa_node
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


class NumberedVendor(BaseVendor):
    """Base class of vendors whose devices are the nodes ``/dev/NAME<N>``, and whose only mask lists their numbers.

    The number of a device is the position of its node among the existing ones, from 0: in a container that has only
    ``/dev/davinci3``, this device has the number 0. This is assumed for all of these runtimes (unverified). Masks are
    written in ascending order, and torch's numbers are positions in it. This is correct for runtimes that keep the
    mask's order and for those that do not.
    """

    torch_index = "ascending"
    name: str
    """Name of the devices for users."""
    node: str
    """Pattern of the names under ``/dev``; the first group is the number."""
    hides_all = ""
    """Value of the mask that hides every device."""

    def discover(self) -> tuple[Device, ...]:
        """Return a device for each node; its id is its PCI address if sysfs lists one that no other node has."""
        found = nodes(self._root / "dev", re.compile(self.node, re.ASCII))
        addresses = {number: pci_address(self._root, name) for number, name in found.items()}
        known = list(addresses.values())
        devices = []
        for index, (number, pci) in enumerate(sorted(addresses.items())):
            device_id = pci if pci is not None and known.count(pci) == 1 else f"{self.kind}-{number}"
            devices.append(Device(self.kind, device_id, index, self.name, pci=pci, numa=numa_node(self._root, pci)))
        return by_pci(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        text = environ.get(self.mask_variables[0])
        return tuple(devices) if text is None else pick_numbers(self.read(text), devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        return {self.mask_variables[0]: write_numbers(devices) if devices else self.hides_all}

    def read(self, text: str) -> list[int]:
        """Return the numbers that the mask `text` lists, as the runtime reads it."""
        return read_numbers(text)


def nodes(folder: Path, name: re.Pattern[str]) -> dict[int, str]:
    """Return the names in `folder` that match `name`, by the number in its first group; subfolders are ignored."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return {}
    matching = [(entry, match) for entry in entries if (match := name.fullmatch(entry.name)) and not entry.is_dir()]
    return {int(match.group(1)): entry.name for entry, match in matching}


def pci_address(root: Path, name: str) -> str | None:
    """Return the PCI address of the device with the node `name`, from any device class in sysfs, or None."""
    for link in sorted((root / "sys/class").glob(f"*/{name}/device")):
        address = link.resolve().name
        if _PCI.fullmatch(address):
            return address
    return None
