"""Intel's (Habana's) Gaudi accelerators, known by their module ids, and used through ``habana_frameworks``.

Sources: the kernel's ``Documentation/ABI/testing/sysfs-driver-habanalabs`` and Habana's patches to it (``module_id``);
the PyTorch bridge (``habana_frameworks/torch/hpu``, ``torch/distributed/hccl``, ``synapse_helpers/device.cpp``).

A process opens one Gaudi: the module that ``HLS_MODULE_ID`` names, else one that is free. ``HABANA_VISIBLE_MODULES``
says which module each number of ``torch.hpu.set_device`` and each local rank is; where it is set, nothing falls back on
another one. The documentation supports partial use of a machine by 2 (``0,1``, ``2,3``, …) and by 4 (``0-3``, ``4-7``)
only, and on Gaudi 3 the bridge refuses odd numbers above 1; whether other sets work is unverified, and nothing here
forbids them. ``HABANA_VISIBLE_DEVICES`` is the container runtime's. Not confirmed on a Gaudi.
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
    """The vendor of kind ``hpu``; a device's index is its module id. `root` is where ``dev`` and ``sys`` are found."""

    kind = "hpu"
    mask_variables: tuple[str, ...] = (_MODULES, _MODULE)
    hardware = True
    backend: str | None = "hccl"
    ranks = True

    def __init__(self, root: Path = Path("/")) -> None:
        self.notes: tuple[str, ...] = ()
        self._root = root

    def lacking(self) -> str | None:
        """Habana's bridge to torch."""
        return not_installed("habana_frameworks")

    def discover(self) -> tuple[Device, ...]:
        """Each node under ``/dev/accel``, a folder that other makers' drivers share, whose PCI vendor is Habana."""
        devices: list[Device] = []
        notes: list[str] = []
        for name in nodes(self._root / "dev/accel", _NODES).values():
            place = self._root / "sys/class/accel" / name / "device"
            if read_number(place / "vendor") != _HABANA:
                continue
            module = read_number(place / "module_id")
            if module is None:
                notes.append(f"{name} is left out: its driver tells no module_id, by which masks name it")
                continue
            pci = read_text(place / "pci_addr").lower() or pci_address(self._root, name)
            devices.append(
                Device(
                    kind=self.kind,
                    id=pci or f"{self.kind}-{module}",
                    index=module,
                    name=f"Intel {read_text(place / 'device_type') or 'Gaudi'}",
                    pci=pci,
                    numa=numa_node(self._root, pci) if pci else None,
                    single_process=True,
                )
            )
        self.notes = tuple(notes)
        return by_pci(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """The modules that are listed, in that order; of these the one that ``HLS_MODULE_ID`` names where it is set."""
        seen = pick_modules(environ[_MODULES], devices) if _MODULES in environ else tuple(devices)
        return pick(read_modules(environ[_MODULE])[:1], seen) if _MODULE in environ else seen

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """As they are in the machine: neither speed nor memory is told."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """The module ids, in the order of `devices`; a single one also as the module to open.

        Without that a process alone would open any that is free. An empty list has the bridge refuse every device.
        """
        modules = [str(device.index) for device in devices]
        return {_MODULES: ",".join(modules), _MODULE: modules[0] if len(modules) == 1 else None}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """``hpu:0`` and on: the bridge keeps the order of the modules."""
        return tuple(f"hpu:{index}" for index in range(len(devices)))

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """MaskError unless the modules that the bridge will read are those of `devices`, and as many are there.

        Its count is Synapse's. Whether that follows the mask is unverified, so more than are leased is no error.
        """
        importlib.import_module("habana_frameworks.torch.core")
        check(devices, importlib.import_module("habana_frameworks.torch.hpu").device_count(), environ)
        # Importing it is what registers the backend.
        importlib.import_module("habana_frameworks.torch.distributed.hccl")


def make(argument: str | None) -> Hpu:
    """For ``--accel hpu``."""
    takes_none("hpu", argument)
    return Hpu()


def read_modules(text: str) -> list[int]:
    """The module ids of ``HABANA_VISIBLE_MODULES=text``, as the bridge reads them: Python's `int` of each entry.

    It fails at one that is no number, and so leaves no device. A repetition counts once.
    """
    try:
        return list(dict.fromkeys(int(entry) for entry in text.split(",")))
    except ValueError:
        return []


def pick_modules(text: str, devices: Sequence[Device]) -> tuple[Device, ...]:
    """Those of `devices` that `text` lists, in its order; a module that is not there is passed over."""
    there = {device.index for device in devices}
    return pick([module for module in read_modules(text) if module in there], devices)


def check(devices: Sequence[Device], count: int, environ: Mapping[str, str]) -> None:
    """MaskError, with both and the environment, unless `devices` are what is listed and `count` is no less."""
    listed = read_modules(environ.get(_MODULES, ""))
    seen = [f"module {module}" for module in listed[:count]]
    if listed != [device.index for device in devices] or count < len(devices):
        raise mismatch("hpu", devices, seen, environ, (_MODULES, _MODULE))
