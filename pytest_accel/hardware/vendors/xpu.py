"""Intel GPUs, from the sysfs files of the kernel's drivers (``xe``, ``i915``); Level Zero is not loaded.

``/sys/class/drm/cardN/device`` is the PCI device. The size of its own memory is in
``device/tileN/physical_vram_size_bytes`` for ``xe`` (kernel: ``drivers/gpu/drm/xe/xe_tile_sysfs.c``, on discrete GPUs
only) and in ``cardN/lmem_total_bytes`` for Intel's out-of-tree ``i915``; the kernel's own ``i915`` does not report it.
That the tiles of a GPU under the out-of-tree ``i915`` are the folders ``cardN/gt/gtN`` is unverified. This module has
not been tested on an Intel GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pytest_accel.core import torch_api
from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import write_numbers
from pytest_accel.hardware.sysfs import numa_node, read_number
from pytest_accel.hardware.vendors.base_vendor import BaseVendor
from pytest_accel.hardware.vendors.xpu_mask import AFFINITY, HIERARCHY, PCI_ORDER, SELECTOR, Card, read_masks

_ALLOWLIST = "SYCL_DEVICE_ALLOWLIST"
_INTEL = 0x8086
_LMEM = "lmem_total_bytes"
_CARD = re.compile(r"card[0-9]+", re.ASCII)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
# intel-gpu-tools (lib/igt_device_scan.h): an integrated GPU always has this address.
_INTEGRATED = "0000:00:02.0"
# INTEL_PVC_IDS in the kernel's i915_pciids.h, and 0bd0 to 0bd2 of its first steppings.
_PONTE_VECCHIO = (0x0B69, 0x0B6E, *range(0x0BD0, 0x0BDC), 0x0BE0, 0x0BE1, 0x0BE5)
_PCI_IDS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")


class Xpu(BaseVendor):
    """The vendor of kind ``xpu``; a device is a whole card, its id is the PCI address.

    Its index is the driver's default number: discrete GPUs come first, then integrated ones, each by PCI address,
    and the driver keeps this order whatever the mask's order is. `root` contains ``usr`` too.
    """

    facts = KINDS["xpu"]

    def __init__(self, root: Path = Path("/")) -> None:
        super().__init__(root)
        self._cards: tuple[tuple[str, Card], ...] = ()

    def discover(self) -> tuple[Device, ...]:
        """Return every GPU, in PCI order.

        A GPU whose render node this process cannot open is left out, with a note; Level Zero does not count it either.
        """
        notes: list[str] = []
        folders: dict[str, Path] = {}
        for folder in sorted((self._root / "sys/class/drm").glob("card*")):
            if not _CARD.fullmatch(folder.name) or read_number(folder / "device/vendor") != _INTEL:
                continue
            address = os.path.basename(os.path.realpath(folder / "device"))
            obstacle = self._obstacle(folder / "device", address)
            if obstacle is None:
                folders[address] = folder
            elif address != _INTEGRATED or not self.lacking():
                # No note about integrated graphics that torch cannot use: containers on such machines lack its node.
                notes.append(f"{folder.name} is left out: {obstacle}")
        self.notes = tuple(notes)
        products = {address: read_number(folder / "device/device") or 0 for address, folder in sorted(folders.items())}
        self._cards = tuple((one, _card(folders[one], one, product)) for one, product in products.items())
        names = _product_names(self._root, set(products.values()))
        counted = sorted(self._cards, key=lambda pair: not pair[1].discrete)
        return by_pci(
            [
                Device(
                    kind=self.kind,
                    id=address,
                    index=index,
                    name=names.get(products[address], f"Intel GPU {products[address]:04x}"),
                    memory=_memory(folders[address]),
                    pci=address,
                    numa=numa_node(self._root, address),
                )
                for index, (address, _) in enumerate(counted)
            ]
        )

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that the masks leave (see `read_masks`), in the driver's order, which masks do not change.

        A card is left if any of its tiles is. Even without a mask, integrated GPUs are left out beside discrete ones,
        as in torch.
        """
        cards = self._counted(devices)
        reading = read_masks(environ, [card for _, card in cards])
        notes = [f"{name}={environ[name]!r} cannot be read by Intel's runtimes" for name in reading.unreadable]
        for positions, what in (
            (reading.unused, "is integrated: torch ignores it, since there are discrete GPUs"),
            (reading.partly, "is used as a whole, although only some of its tiles are visible"),
        ):
            notes += [f"{cards[at][0]} {what}" for at in positions]
        if _ALLOWLIST in environ:
            notes.append(f"{_ALLOWLIST} is not read: devices that it hides are counted")
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))
        known = {device.id: device for device in devices}
        return tuple(known[cards[at][0]] for at in reading.left if cards[at][0] in known)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the driver's numbers; whole cards are devices, in the driver's default order.

        In that order an integrated GPU does not shift the numbers of discrete ones. In PCI order it would if the driver
        supports it, which sysfs does not show: GPUs before the 12th generation have another driver (compute-runtime,
        ``LEGACY_PLATFORMS.md``). ``-1`` hides every device (according to the driver's source code only), since an empty
        mask shows all.
        """
        return {AFFINITY: write_numbers(devices) or "-1", HIERARCHY: "COMPOSITE", PCI_ORDER: None, SELECTOR: None}

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Raise MaskError unless torch, built for XPU, sees exactly `devices`, at their addresses if torch has them.

        torch has addresses since pull request 161392 (2025). Names are not compared: sysfs has none, and the driver's
        names differ from those in the machine's list of products.
        """
        import torch

        count, reason = torch.xpu.device_count(), ""
        if lacking := self.lacking():
            reason = f"; {lacking}"
        elif count:
            # Before it is initialised, torch may count by Sysman, which has another order (torch-xpu-ops issue 5015).
            torch.xpu.init()
            count = torch.xpu.device_count()
        properties = [torch.xpu.get_device_properties(index) for index in range(count)]
        seen = [address_in(bytes(getattr(torch_api.device_uuid(one), "bytes", b""))) or "?" for one in properties]
        self.compare(_by_driver(devices), seen, environ, reason)

    def is_same(self, device: Device, seen: str) -> bool:
        return seen in ("?", device.id)

    def _counted(self, devices: Sequence[Device]) -> tuple[tuple[str, Card], ...]:
        """Return the cards that the driver counts, in PCI order; `devices` if none can be discovered."""
        if not self._cards:
            self.discover()
        return self._cards or tuple((device.id, Card()) for device in _by_driver(devices))

    def _obstacle(self, device: Path, address: str) -> str | None:
        """Return why Level Zero cannot use the PCI device at `address`, or None if it can."""
        if not _ADDRESS.fullmatch(address):
            return f"{address!r} is not a PCI address"
        driver = os.path.basename(os.path.realpath(device / "driver"))
        if driver not in ("i915", "xe"):
            return f"the driver of {address} is {driver!r}, which is neither i915 nor xe"
        nodes = [f"dev/dri/{node.name}" for node in sorted((device / "drm").glob("renderD*"))]
        if any(os.access(self._root / node, os.R_OK | os.W_OK) for node in nodes):
            return None
        return f"{address} has no render node that this process can open ({', '.join(nodes) or 'it has none'})"


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


def _by_driver(devices: Sequence[Device]) -> list[Device]:
    return sorted(devices, key=lambda device: device.index)


def _product_names(root: Path, products: Collection[int]) -> dict[int, str]:
    """Return the names of `products` from the machine's list of PCI ids: the part in brackets, ``Intel Arc A770``."""
    names: dict[int, str] = {}
    wanted = {f"{product:04x}": product for product in products}
    for file in (root / path for path in _PCI_IDS if wanted):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        _, _, text = text.partition(f"\n{_INTEL:04x} ")
        for line in text.splitlines()[1:]:
            if line.startswith("\t"):
                product, _, name = line[1:].partition(" ")
                if product in wanted:
                    names.setdefault(wanted[product], f"Intel {name.strip().rpartition('[')[2].rstrip(']')}")
            elif line and not line.startswith("#"):
                break
    return names


def _card(folder: Path, address: str, product: int) -> Card:
    files = _memory_files(folder)
    tiles = len(list(folder.glob("gt/gt[0-9]*"))) if files == [folder / _LMEM] else len(files)
    return Card(bool(files) or address != _INTEGRATED, max(tiles, 1), product in _PONTE_VECCHIO)


def _memory_files(folder: Path) -> list[Path]:
    """Return the files with the size of the card's own memory: one for each tile under ``xe``, else one or none."""
    files = sorted((folder / "device").glob("tile[0-9]*/physical_vram_size_bytes"))
    return files or [file for file in (folder / _LMEM,) if file.exists()]


def _memory(folder: Path) -> int | None:
    """Return the size of the card's own memory; None if it is not reported."""
    sizes = [read_number(file) for file in _memory_files(folder)]
    return sum(size or 0 for size in sizes) if sizes and all(sizes) else None
