"""The kinds whose devices are nodes under ``/dev``, and whose only mask lists the numbers of devices.

These kinds differ only in what the table says (`core/kinds.py`), which also names the sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KindFacts
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import pick_numbers, read_numbers, write_numbers
from pytest_accel.hardware.sysfs import nodes, numa_node, pci_address
from pytest_accel.hardware.vendors.base_vendor import BaseVendor


class NumberedVendor(BaseVendor):
    """The vendor of such a kind.

    The number of a device is the position of its node among the existing ones, from 0: in a container that has only
    ``/dev/davinci3``, this device has the number 0. This is assumed for all of these runtimes (unverified). The number
    is part of the device (`Device.index`), so a rank can read and write masks without inspecting the machine.
    """

    def __init__(self, facts: KindFacts, root: Path = Path("/")) -> None:
        self.facts = facts
        super().__init__(root)

    @classmethod
    def make(cls, facts: KindFacts, argument: str | None) -> NumberedVendor:
        return cls(facts)

    def discover(self) -> tuple[Device, ...]:
        """Return a device for each node; its id is its PCI address if sysfs lists one that no other node has."""
        found = nodes(self._root / "dev", self.facts.nodes)
        addresses = {number: pci_address(self._root, name) for number, name in found.items()}
        known = list(addresses.values())
        devices = []
        for index, (number, pci) in enumerate(sorted(addresses.items())):
            device_id = pci if pci is not None and known.count(pci) == 1 else f"{self.kind}-{number}"
            numa = numa_node(self._root, pci)
            devices.append(Device(self.kind, device_id, index, self.facts.title, pci=pci, numa=numa))
        return by_pci(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        text = environ.get(self.facts.masks[0])
        if text is None:
            return tuple(devices)
        read = re.match(self.facts.reads, text)
        return pick_numbers(read_numbers(read[0] if read else ""), devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        return {self.facts.masks[0]: write_numbers(devices) if devices else self.facts.hides_all}


make = NumberedVendor.make
