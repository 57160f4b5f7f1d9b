"""The kinds whose devices are nodes under ``/dev``, and whose mask lists the numbers of devices.

The table in `core/kinds.py` has their differences. docs/reference/devices.md has notes on each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pytest_accel.core.device import Device, MaskError
from pytest_accel.core.kinds import PJRT_DEVICE
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.kernel_files import class_folder, nodes, numa_node, pci_address, read_number, read_text
from pytest_accel.hardware.masks import read_devices, write_numbers
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_RANGE = re.compile(r"\b([0-9]{1,4})-([0-9]{1,4})\b", re.ASCII)


class NumberedVendor(BaseVendor):
    """The vendor of a kind with numbered devices.

    If the driver does not report it, a device's number is the position of its node among the existing nodes, from 0: in
    a container that has only ``/dev/davinci3``, this device has the number 0. This is assumed for all of these runtimes
    (unverified). The number is part of the device (`Device.index`), so a rank can read and write masks without
    inspecting the machine.
    """

    def discover(self) -> tuple[Device, ...]:
        """Return the devices of each node; the id is the PCI address if sysfs lists it for this node alone."""
        self.notes = ()
        facts, found = self.facts, list[Device]()
        addresses = [(*node, pci_address(self._root, node[1])) for node in nodes(self._root / "dev", facts.nodes)]
        known = [pci for _, _, pci in addresses]
        for number, name, pci in addresses:
            folder, card = class_folder(self._root, name), self._root / f"sys/bus/pci/devices/{pci}"
            if facts.maker and pci and read_number(card / "vendor") != facts.maker:
                continue
            index = read_number(folder / facts.number) if facts.number else len(found)
            if index is None:
                self.note(f"{name} is left out: its driver does not report the number that masks need")
                continue
            model = read_text(folder / facts.model) if facts.model else ""
            title = f"{facts.title.split()[0]} {model}" if model else facts.title
            device = Device(
                kind=self.kind,
                id=pci if pci and known.count(pci) == 1 else f"{self.kind}-{index if facts.number else number}",
                index=index,
                name=(facts.models or {}).get(read_number(card / "device") or 0, title),
                pci=pci,
                numa=numa_node(self._root, pci),
                single_process=facts.single_process,
            )
            found += self.parts(device, folder)
        return by_pci(found)

    def parts(self, device: Device, folder: Path) -> Sequence[Device]:
        """Return the devices of a node, whose folder in sysfs is `folder`: `device`, or several instead of it."""
        return (device,)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that every list in `environ` names; none if torch_xla runs on another kind of device."""
        runtime = self.facts.runtime
        left = () if runtime and environ.get(PJRT_DEVICE, runtime) != runtime else tuple(devices)
        for name in self.mask_variables:
            if name in environ and name != PJRT_DEVICE:
                read = read_devices(self.spelled_out(environ[name]), left)
                if read is None and left:
                    self.note(f"no device is used: {name}={environ[name]!r} is no list of numbers of devices")
                left = read or ()
        return left

    def spelled_out(self, text: str) -> str:
        """Return the text of a mask without abbreviations."""
        return text

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the numbers, ascending unless the runtime keeps the order. Other lists are removed.

        Without devices, torch_xla gets the CPU as its device, in case an empty list hides nothing.
        """
        facts = self.facts
        in_order = ",".join(str(device.index) for device in devices)
        text = in_order if facts.torch_index == "mask" else write_numbers(devices)
        changes: dict[str, str | None] = dict.fromkeys(facts.masks)
        changes[facts.masks[0]] = text or facts.hides_all
        if facts.single and len(devices) == 1:
            changes[facts.single] = text
        if facts.runtime:
            changes[PJRT_DEVICE] = facts.runtime if devices else "CPU"
        return changes

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Raise MaskError unless this process has the mask of `devices`, and torch counts as many."""
        variable = self.mask_variables[0]
        text = self.mask(devices, environ)[variable]
        if environ.get(variable) != text:
            raise MaskError(f"the process should have {variable}={text!r}; environment: {self.shown(environ)}")
        super().verify(devices, environ)


class Tpu(NumberedVendor):
    """The vendor of kind ``tpu``: libtpu also needs the shape of the group of chips, in variables with two names."""

    _SHAPES = MappingProxyType({1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"})

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the chips and, if there are 1, 2, 4 or 8, their shape; libtpu has to find other shapes."""
        # Set both names: unless set, torch_xla presets the newer for one chip; Ray sets the older (jax issue 14977).
        chips = self._SHAPES.get(len(devices))
        shapes = dict.fromkeys(("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"), chips)
        shapes |= dict.fromkeys(("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"), "1,1,1" if chips else None)
        return {**super().mask(devices, environ), **shapes}


class Neuron(NumberedVendor):
    """The vendor of kind ``neuron``: a node is a card, and a device is one NeuronCore as the runtime counts them."""

    def parts(self, device: Device, folder: Path) -> Sequence[Device]:
        """Return the cores of a card. The runtime may combine two into one."""
        # Driver 2.31 moved parts of the tree in sysfs: count the cores' folders if the file is missing.
        cores = read_number(folder / "core_count") or len(list(folder.glob("neuron_core[0-9]*")))
        if not cores:
            self.note(f"{device.id} is left out: sysfs does not have its number of cores")
        combined = os.environ.get("NEURON_LOGICAL_NC_CONFIG") or os.environ.get("NEURON_RT_VIRTUAL_CORE_SIZE")
        # On Trainium2 the runtime combines two cores by default. That it does so on Trainium3 is unverified.
        default = 2 if device.name.endswith(("Trainium2", "Trainium3")) else 1
        size = int(combined) if combined in ("1", "2") else default
        return [
            replace(device, id=f"{device.id}.{first}", index=device.index + position)
            for position, first in enumerate(range(0, cores, size))
        ]

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the cores in the list; without a list, as many of the first cores as the other variable says."""
        variable, number, _ = self.mask_variables
        left = super().visible(devices, {name: text for name, text in environ.items() if name != number})
        # Take the first cores: it is not known beforehand which ones the runtime would choose.
        count = environ.get(number, "")
        return left[: int(count)] if variable not in environ and count.isdecimal() and int(count) else left

    def spelled_out(self, text: str) -> str:
        """Return the text of a list with numbers in place of ranges: ``0-2`` is ``0,1,2``."""
        return _RANGE.sub(lambda run: ",".join(map(str, range(int(run[1]), int(run[2]) + 1))), text)
