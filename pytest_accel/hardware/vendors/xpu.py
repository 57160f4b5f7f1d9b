"""Intel GPUs, from the sysfs files of the kernel's drivers (``xe``, ``i915``); Level Zero is not loaded.

``/sys/class/drm/cardN/device`` is the PCI device. The size of its own memory is in
``device/tileN/physical_vram_size_bytes`` for ``xe`` (kernel: ``drivers/gpu/drm/xe/xe_tile_sysfs.c``, on discrete GPUs
only) and in ``cardN/lmem_total_bytes`` for Intel's out-of-tree ``i915``; the kernel's own ``i915`` does not report it.
This module has not been tested on an Intel GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_accel.compat import torch_api
from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import read_devices, write_numbers
from pytest_accel.hardware.sysfs import numa_node, read_number, read_text
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_AFFINITY, _SELECTOR = KINDS["xpu"].masks
_HIERARCHY, _PCI_ORDER = "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_ONLY_TORCH_READS = (_PCI_ORDER, _SELECTOR, "SYCL_DEVICE_ALLOWLIST")
"""Variables with a language of their own each, which only Intel's runtimes read."""
_INTEL = 0x8086
# intel-gpu-tools (lib/igt_device_scan.h): an integrated GPU always has this address.
_INTEGRATED = "0000:00:02.0"
_PCI_IDS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")


class Xpu(BaseVendor):
    """The vendor of kind ``xpu``; a device is a whole card, its id is the PCI address.

    Its index is the driver's default number: discrete GPUs come first, then integrated ones, each by PCI address,
    and the driver keeps this order whatever the mask's order is. `root` contains ``usr`` too.
    """

    facts = KINDS["xpu"]

    def discover(self) -> tuple[Device, ...]:
        """Return every GPU, in PCI order.

        A GPU whose render node this process cannot open is left out, with a note; Level Zero does not count it either.
        """
        notes: list[str] = []
        folders: dict[str, Path] = {}
        for folder in sorted((self._root / "sys/class/drm").glob("card*")):
            if read_number(folder / "device/vendor") != _INTEL:
                continue
            address = (folder / "device").resolve().name
            nodes = [f"dev/dri/{node.name}" for node in sorted((folder / "device/drm").glob("renderD*"))]
            if any(os.access(self._root / node, os.R_OK | os.W_OK) for node in nodes):
                folders[address] = folder
            else:
                names = ", ".join(nodes) or "it has none"
                notes.append(f"{address} is left out: it has no render node that this process can open ({names})")
        self.notes = tuple(notes)
        devices = [
            Device(
                kind=self.kind,
                id=address,
                index=0,
                name=_product_name(self._root, read_number(folder / "device/device") or 0),
                memory=_memory(folder),
                pci=address,
                numa=numa_node(self._root, address),
            )
            for address, folder in sorted(folders.items())
        ]
        devices.sort(key=lambda device: not _is_discrete(device))
        return by_pci([replace(device, index=index) for index, device in enumerate(devices)])

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that the masks leave, in the driver's order, which masks do not change.

        A list of numbers of whole cards is read here; for anything else, torch is asked in a short process. Even
        without a mask, integrated GPUs are left out beside discrete ones, as in torch.
        """
        left: Sequence[Device] | None = devices
        if (text := environ.get(_AFFINITY, "")) not in ("", "default"):
            # By default, the numbers count tiles.
            left = read_devices(text, devices) if environ.get(_HIERARCHY) == "COMPOSITE" else None
        if left is None or any(environ.get(name) for name in _ONLY_TORCH_READS):
            return self.ask(devices, environ)
        counted = sorted(left or (), key=lambda device: device.index)
        discrete = [device for device in counted if _is_discrete(device)]
        for device in counted if discrete else ():
            if not _is_discrete(device):
                self.note(f"{device.id} is integrated: torch ignores it, since there are discrete GPUs")
        return tuple(discrete or counted)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the driver's numbers; whole cards are devices, in the driver's default order."""
        # In that order an integrated GPU does not shift the numbers of discrete ones. In PCI order it would if the
        # driver supports it, which sysfs does not show: GPUs before the 12th generation have another driver
        # (compute-runtime, ``LEGACY_PLATFORMS.md``). ``-1`` hides every device (according to the driver's source code
        # only); an empty mask shows all.
        return {_AFFINITY: write_numbers(devices) or "-1", _HIERARCHY: "COMPOSITE", _PCI_ORDER: None, _SELECTOR: None}

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        """Return the PCI address of each device that torch sees; ``?`` if it does not know the address.

        torch has addresses since pull request 161392 (2025). Names are not compared: sysfs has none, and the driver's
        names differ from those in the machine's list of products.
        """
        import torch

        if torch.xpu.device_count():
            # Before it is initialised, torch may count by Sysman, which has another order (torch-xpu-ops issue 5015).
            torch.xpu.init()
        properties = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
        return [address_in(bytes(getattr(torch_api.device_uuid(one), "bytes", b""))) or "?" for one in properties]

    def is_same(self, device: Device, seen: str) -> bool:
        return seen in ("?", device.id)


make = Xpu.make


def address_in(uuid: bytes) -> str | None:
    """Return the PCI address in a UUID of Level Zero, or None if the UUID has another form.

    The UUID consists of vendor, product, revision and PCI domain, two bytes each in little-endian order, then bus,
    device and function, four zero bytes and the tile (compute-runtime, ``Device::generateUuidFromPciBusInfo``). On some
    GPUs the UUID is the chip's own number instead.
    """
    if len(uuid) != 16 or int.from_bytes(uuid[:2], "little") != _INTEL or any(uuid[11:15]):
        return None
    return f"{int.from_bytes(uuid[6:8], 'little'):04x}:{uuid[8]:02x}:{uuid[9]:02x}.{uuid[10]:x}"


def _is_discrete(device: Device) -> bool:
    return device.memory is not None or device.id != _INTEGRATED


def _product_name(root: Path, product: int) -> str:
    """Return the name of a product from the machine's list of PCI ids: the part in brackets, ``Intel Arc A770``."""
    # The lines of a vendor's products begin with a tab.
    line = re.compile(rf"^{_INTEL:04x} .*\n(?:[\t#].*\n)*?\t{product:04x}  (.*)", re.MULTILINE)
    for file in _PCI_IDS:
        if found := line.search(read_text(root / file)):
            return f"Intel {found[1].rpartition('[')[2].rstrip(']')}"
    return f"Intel GPU {product:04x}"


def _memory(folder: Path) -> int | None:
    """Return the size of the card's own memory, which ``xe`` reports for each tile; None if it is not reported."""
    tiles = (folder / "device").glob("tile[0-9]*/physical_vram_size_bytes")
    sizes = [read_number(file) for file in (*tiles, folder / "lmem_total_bytes") if file.exists()]
    return sum(size or 0 for size in sizes) if sizes and all(sizes) else None
