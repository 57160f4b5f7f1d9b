"""Intel GPUs, from the sysfs files of the kernel's drivers (``xe``, ``i915``); Level Zero is not loaded.

``/sys/class/drm/renderDN/device`` is the PCI device. The size of its own memory is in
``device/tileN/physical_vram_size_bytes`` for ``xe`` (kernel: ``drivers/gpu/drm/xe/xe_tile_sysfs.c``, on discrete GPUs
only); ``i915`` does not report it there. This module has not been tested on an Intel GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pytest_accel.compat import torch_api
from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.kernel_files import numa_node, read_number
from pytest_accel.hardware.masks import read_devices, write_numbers
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_AFFINITY, _SELECTOR = KINDS["xpu"].masks
_HIERARCHY, _PCI_ORDER = "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
_ONLY_TORCH_READS = (_PCI_ORDER, _SELECTOR, "SYCL_DEVICE_ALLOWLIST")
"""Variables with a language of their own each, which only Intel's runtimes read."""
_INTEL = 0x8086
# intel-gpu-tools (lib/igt_device_scan.h): an integrated GPU always has this address.
_INTEGRATED = "0000:00:02.0"


class Xpu(BaseVendor):
    """The vendor of kind ``xpu``; a device is a whole card, its id is the PCI address.

    Its index is the driver's default number: discrete GPUs come first, each by PCI address, and the driver keeps this
    order whatever the mask's order is.
    """

    def discover(self) -> tuple[Device, ...]:
        """Return the GPUs, in PCI order. Those that are left out have a line in `notes`.

        Level Zero does not count a GPU whose render node this process cannot open. torch ignores an integrated GPU
        beside discrete GPUs.
        """
        self.notes = ()
        found: dict[str, Device] = {}
        for folder in sorted((self._root / "sys/class/drm").glob("renderD*")):
            card = folder / "device"
            if read_number(card / "vendor") != _INTEL:
                continue
            address = card.resolve().name
            if not os.access(self._root / "dev/dri" / folder.name, os.R_OK | os.W_OK):
                self.note(f"{address} is left out: this process cannot open its render node dev/dri/{folder.name}")
                continue
            sizes = [read_number(file) or 0 for file in card.glob("tile[0-9]*/physical_vram_size_bytes")]
            name = f"Intel GPU {read_number(card / 'device') or 0:04x}"
            numa = numa_node(self._root, address)
            found[address] = Device(self.kind, address, 0, name, sum(sizes) or None, pci=address, numa=numa)
        integrated = found.get(_INTEGRATED)
        if integrated is not None and integrated.memory is None and len(found) > 1:
            self.note(f"{_INTEGRATED} is left out: it is integrated, and there are discrete GPUs")
            del found[_INTEGRATED]
        return tuple(replace(found[address], index=index) for index, address in enumerate(sorted(found)))

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that the masks leave, in the driver's order, which masks do not change.

        A list of numbers of whole cards is read here; for anything else, torch is asked in a short process.
        """
        left: Sequence[Device] | None = devices
        if (text := environ.get(_AFFINITY, "")) not in ("", "default"):
            # By default, the numbers count tiles.
            left = read_devices(text, devices) if environ.get(_HIERARCHY) == "COMPOSITE" else None
        if left is None or any(environ.get(name) for name in _ONLY_TORCH_READS):
            return self.ask(devices, environ)
        return tuple(sorted(left, key=lambda device: device.index))

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the driver's numbers; whole cards are devices, in the driver's default order."""
        # In that order an integrated GPU does not shift the numbers of discrete ones. In PCI order it would if the
        # driver supports it, which sysfs does not show: GPUs before the 12th generation have another driver
        # (compute-runtime, ``LEGACY_PLATFORMS.md``). ``-1`` hides every device (according to the driver's source code
        # only); an empty mask shows all.
        return {_AFFINITY: write_numbers(devices) or "-1", _HIERARCHY: "COMPOSITE", _PCI_ORDER: None, _SELECTOR: None}

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        """Return the PCI address of each device that torch sees; ``?`` if it does not know the address.

        torch has addresses since pull request 161392 (2025). Names are not compared: sysfs has none.
        """
        import torch

        if torch.xpu.device_count():
            # Before it is initialised, torch may count by Sysman, which has another order (torch-xpu-ops issue 5015).
            torch.xpu.init()
        properties = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
        return [address_in(bytes(getattr(torch_api.device_uuid(one), "bytes", b""))) or "?" for one in properties]


def address_in(uuid: bytes) -> str | None:
    """Return the PCI address in a UUID of Level Zero, or None if the UUID has another form.

    The UUID consists of vendor, product, revision and PCI domain, two bytes each in little-endian order, then bus,
    device and function, four zero bytes and the tile (compute-runtime, ``Device::generateUuidFromPciBusInfo``). On some
    GPUs the UUID is the chip's own number instead.
    """
    if len(uuid) != 16 or int.from_bytes(uuid[:2], "little") != _INTEL or any(uuid[11:15]):
        return None
    return f"{int.from_bytes(uuid[6:8], 'little'):04x}:{uuid[8]:02x}:{uuid[9]:02x}.{uuid[10]:x}"
