"""Google's TPU chips, used through ``torch_xla``. Not tested on a TPU.

Chips are Google's PCI devices (ids from JAX's ``hardware_utils.py`` and torch_xla's ``_internal/tpu.py``) with a node:
``/dev/accelN`` of Google's own driver, or ``/dev/vfio/GROUP``. The folder ``/dev/accel`` belongs to other vendors.

``TPU_VISIBLE_CHIPS`` is not enough: libtpu also needs the shape of the group of chips. The shape has two names:
``TPU_CHIPS_PER_PROCESS_BOUNDS`` with ``TPU_PROCESS_BOUNDS`` (torch_xla presets these for one chip if they are not set)
and, for older releases, ``TPU_CHIPS_PER_HOST_BOUNDS`` with ``TPU_HOST_BOUNDS`` (set by Ray; jax issue 14977).
``TPU_VISIBLE_DEVICES`` is the old name of the mask, which is read if the new one is not set or empty. Unverified: which
chip a number means (here: its position in PCI order), and that torch numbers chips in ascending order. A chip serves
one process at a time, so ranks need ``visible="rank"``; chips in separate masks do not form a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.masks import pick_numbers, read_numbers, write_numbers
from pytest_accel.hardware.sysfs import nodes, numa_node, read_number
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_RUNTIME, _CHIPS, _OLD = KINDS["tpu"].masks
_SHAPES = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
_PROCESSES = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
_GOOGLE = 0x1AE0
_NAMES = {
    0x27: "TPU v2 or v3",
    0x56: "TPU v4 lite",
    0x5E: "TPU v4",
    0x62: "TPU v5p",
    0x63: "TPU v5e",
    0x6F: "TPU v6e",
    0x76: "TPU 7x",
}
# Up to v3, the two cores of a chip are two devices of torch_xla; later they are one (num_logical_cores_per_chip).
_TWO_CORES = _NAMES[0x27]
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}


class Tpu(BaseVendor):
    """The vendor of kind ``tpu``; a device's index is its chip's number."""

    facts = KINDS["tpu"]

    def discover(self) -> tuple[Device, ...]:
        """Return every chip that has a node, in PCI order."""
        accel, groups = nodes(self._root / "dev", "accel([0-9]+)"), nodes(self._root / "dev/vfio", "([0-9]+)")
        if not accel and not groups:
            return ()
        folders = sorted((self._root / "sys/bus/pci/devices").glob("*"))
        google = [folder for folder in folders if read_number(folder / "vendor") == _GOOGLE]
        chips = {folder: _NAMES[model] for folder in google if (model := read_number(folder / "device")) in _NAMES}
        found: list[tuple[str, str, str | None]]
        if accel and len(accel) != len(chips):
            # This container has only some of the chips, and no file says which ones.
            name = chips[next(iter(chips))] if len({*chips.values()}) == 1 else "TPU"
            found = [(f"{self.kind}-{number}", name, None) for number in sorted(accel) if chips]
        else:
            present = {*groups.values()}
            found = [
                (folder.name, name, folder.name)
                for folder, name in chips.items()
                if accel or (folder / "iommu_group").resolve().name in present
            ]
        return tuple(
            Device(self.kind, name, index, title, pci=pci, numa=numa_node(self._root, pci), single_process=True)
            for index, (name, title, pci) in enumerate(found)
        )

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the chips that the mask leaves; none if the environment tells torch_xla to run on another device."""
        if environ.get(_RUNTIME, "TPU") != "TPU":
            return ()
        text = environ.get(_CHIPS) or environ.get(_OLD)
        return pick_numbers(read_numbers(text), devices) if text else tuple(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the chips, ascending, and their shape if there are 1, 2 or 4.

        For other numbers libtpu has to find the shape. All chips of the machine need no mask; if no inherited mask
        hides one of them, an inherited shape is kept. No list hides all chips (an empty one is ignored), so without
        devices the mask makes torch_xla run on the CPU.
        """
        if not devices:
            return {_RUNTIME: "CPU"}
        chips_of_machine = self.discover()
        whole = set(chips_of_machine) == set(devices)
        if whole and len(self.visible(chips_of_machine, {**environ, _RUNTIME: "TPU"})) == len(chips_of_machine):
            return {_RUNTIME: "TPU"}
        chips = None if whole else write_numbers(devices)
        shape = None if whole else _BOUNDS.get(len(devices))
        changes: dict[str, str | None] = {_RUNTIME: "TPU", _CHIPS: chips, _OLD: chips}
        changes |= dict.fromkeys(_SHAPES, shape)
        return changes | dict.fromkeys(_PROCESSES, None if shape is None else "1,1,1")

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return ``xla:N`` for each chip, in ascending order of numbers; for a chip with two cores, the first core."""
        ascending = sorted(devices, key=lambda device: device.index)
        first = {device: sum(map(_cores, ascending[:position])) for position, device in enumerate(ascending)}
        return tuple(f"xla:{first[device]}" for device in devices)

    def compare(
        self, devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str], reason: str = ""
    ) -> None:
        """Raise MaskError unless `seen` has as many entries as `devices` have cores."""
        super().compare([device for device in devices for _ in range(_cores(device))], seen, environ, reason)


make = Tpu.make


def _cores(device: Device) -> int:
    return 2 if device.name == _TWO_CORES else 1
