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
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.hardware.order import by_figures, by_pci
from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import (
    mismatch,
    nodes,
    not_installed,
    numa_node,
    pci_address,
    pick,
    read_number,
    read_text,
)

_MODULES, _MODULE = "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"
_HABANA = 0x1DA3
_NODES = re.compile(r"accel([0-9]+)", re.ASCII)


class Hpu:
    """The vendor of kind ``hpu``; a device's index is its module id. `root` is the folder with ``dev`` and ``sys``."""

    kind = "hpu"
    mask_variables: tuple[str, ...] = (_MODULES, _MODULE)
    hardware = True
    backend: str | None = "hccl"
    ranks = True

    def __init__(self, root: Path = Path("/")) -> None:
        self.notes: tuple[str, ...] = ()
        self._root = root

    def lacking(self) -> str | None:
        """Return a text if Habana's bridge to torch is not installed, else None."""
        return not_installed("habana_frameworks")

    def discover(self) -> tuple[Device, ...]:
        """Return a device for each of Habana's nodes in ``/dev/accel``, a folder that other vendors use too."""
        devices: list[Device] = []
        notes: list[str] = []
        for name in nodes(self._root / "dev/accel", _NODES).values():
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
                    numa=numa_node(self._root, pci) if pci else None,
                    single_process=True,
                )
            )
        self.notes = tuple(notes)
        return by_pci(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the modules in ``HABANA_VISIBLE_MODULES``, in its order; only ``HLS_MODULE_ID`` if that is set."""
        seen = pick_modules(environ[_MODULES], devices) if _MODULES in environ else tuple(devices)
        return pick(read_modules(environ[_MODULE])[:1], seen) if _MODULE in environ else seen

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return `devices` in PCI order: neither their speed nor their memory is known."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the module ids, in the order of `devices`; a single one also as the module to open.

        Without the latter, a process would open any free module. With an empty list the bridge refuses every device.
        """
        modules = [str(device.index) for device in devices]
        return {_MODULES: ",".join(modules), _MODULE: modules[0] if len(modules) == 1 else None}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return ``hpu:0``, ``hpu:1``, ...: the bridge keeps the order of the modules."""
        return tuple(f"hpu:{index}" for index in range(len(devices)))

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Raise MaskError unless the bridge will read the modules of `devices` from the mask, and counts as many.

        Its count comes from Synapse. Whether Synapse respects the mask is unverified, so a larger count is no error.
        """
        importlib.import_module("habana_frameworks.torch.core")
        check(devices, importlib.import_module("habana_frameworks.torch.hpu").device_count(), environ)
        # The import registers the backend.
        importlib.import_module("habana_frameworks.torch.distributed.hccl")


def make(argument: str | None) -> Hpu:
    """Return the vendor for ``--accel hpu``."""
    takes_none("hpu", argument)
    return Hpu()


def read_modules(text: str) -> list[int]:
    """Return the module ids of ``HABANA_VISIBLE_MODULES=text`` as the bridge reads them: Python's `int` of each entry.

    The bridge fails if an entry is not a number, so no device is left. A repetition counts once.
    """
    try:
        return list(dict.fromkeys(int(entry) for entry in text.split(",")))
    except ValueError:
        return []


def pick_modules(text: str, devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return those of `devices` that `text` lists, in its order; modules that do not exist are ignored."""
    existing = {device.index for device in devices}
    return pick([module for module in read_modules(text) if module in existing], devices)


def check(devices: Sequence[Device], count: int, environ: Mapping[str, str]) -> None:
    """Raise MaskError unless the mask in `environ` lists exactly `devices`, and `count` is at least their number."""
    listed = read_modules(environ.get(_MODULES, ""))
    seen = [f"module {module}" for module in listed[:count]]
    if listed != [device.index for device in devices] or count < len(devices):
        raise mismatch("hpu", devices, seen, environ, (_MODULES, _MODULE))
