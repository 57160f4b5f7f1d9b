"""Intel's (Habana's) Gaudi accelerators, identified by their module ids and used through ``habana_frameworks``.

Sources: the kernel's ``Documentation/ABI/testing/sysfs-driver-habanalabs`` and Habana's patches to it (``module_id``);
the PyTorch bridge (``habana_frameworks/torch/hpu``, ``torch/distributed/hccl``, ``synapse_helpers/device.cpp``).

A process opens one Gaudi: the module that ``HLS_MODULE_ID`` names, else a free one. ``HABANA_VISIBLE_MODULES`` maps
the numbers of ``torch.hpu.set_device`` and the local ranks to modules; if it is set, no other module is used instead.
The documentation supports partial use of a machine only by 2 (``0,1``, ``2,3``, …) and by 4 (``0-3``, ``4-7``), and on
Gaudi 3 the bridge refuses odd numbers above 1; whether other sets work is unverified, and this module does not forbid
them. ``HABANA_VISIBLE_DEVICES`` is a variable of the container runtime. This module has not been tested on a Gaudi.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import pick_numbers
from pytest_accel.hardware.sysfs import nodes, numa_node, pci_address, read_number, read_text
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_MODULES, _MODULE = KINDS["hpu"].masks
_HABANA = 0x1DA3


class Hpu(BaseVendor):
    """The vendor of kind ``hpu``; a device's index is its module id."""

    facts = KINDS["hpu"]

    def discover(self) -> tuple[Device, ...]:
        """Return a device for each of Habana's nodes in ``/dev/accel``, a folder that other vendors use too."""
        devices: list[Device] = []
        notes: list[str] = []
        for name in nodes(self._root / "dev/accel", "accel([0-9]+)").values():
            folder = self._root / "sys/class/accel" / name / "device"
            if read_number(folder / "vendor") != _HABANA:
                continue
            module = read_number(folder / "module_id")
            if module is None:
                notes.append(f"{name} is left out: its driver reports no module_id, which masks need")
                continue
            pci = read_text(folder / "pci_addr").lower() or pci_address(self._root, name)
            devices.append(
                Device(
                    kind=self.kind,
                    id=pci or f"{self.kind}-{module}",
                    index=module,
                    name=f"Intel {read_text(folder / 'device_type') or 'Gaudi'}",
                    pci=pci,
                    numa=numa_node(self._root, pci),
                    single_process=True,
                )
            )
        self.notes = tuple(notes)
        return by_pci(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the modules in ``HABANA_VISIBLE_MODULES``, in its order; only ``HLS_MODULE_ID`` if that is set."""
        seen = tuple(devices)
        if _MODULES in environ:
            # Modules that do not exist are ignored.
            by_module = {device.index: device for device in devices}
            seen = tuple(by_module[module] for module in read_modules(environ[_MODULES]) if module in by_module)
        return pick_numbers(read_modules(environ[_MODULE])[:1], seen) if _MODULE in environ else seen

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the module ids, in the order of `devices`; a single one also as the module to open.

        Without the latter, a process would open any free module. With an empty list the bridge refuses every device.
        """
        modules = [str(device.index) for device in devices]
        return {_MODULES: ",".join(modules), _MODULE: modules[0] if len(modules) == 1 else None}

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Raise MaskError unless the bridge will read the modules of `devices` from the mask, and counts as many.

        Its count comes from Synapse. Whether Synapse respects the mask is unverified, so a larger count is no error.
        """
        importlib.import_module("habana_frameworks.torch.core")
        count = importlib.import_module("habana_frameworks.torch.hpu").device_count()
        self.compare(devices, modules_seen(environ, count, len(devices)), environ)
        # The import registers the backend.
        importlib.import_module("habana_frameworks.torch.distributed.hccl")

    def is_same(self, device: Device, seen: str) -> bool:
        return seen == f"module {device.index}"


make = Hpu.make


def read_modules(text: str) -> list[int]:
    """Return the module ids of ``HABANA_VISIBLE_MODULES=text`` as the bridge reads them: Python's `int` of each entry.

    The bridge fails if an entry is not a number, so no device is left. A repetition counts once.
    """
    try:
        return list(dict.fromkeys(int(entry) for entry in text.split(",")))
    except ValueError:
        return []


def modules_seen(environ: Mapping[str, str], count: int, needed: int) -> list[str]:
    """Return the modules in the mask; only the first `count` if Synapse counts fewer than the `needed` devices."""
    listed = read_modules(environ.get(_MODULES, ""))
    return [f"module {module}" for module in (listed if count >= needed else listed[:count])]
