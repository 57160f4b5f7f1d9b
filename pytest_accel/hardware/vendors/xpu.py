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
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_accel.core import torch_api
from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import write_numbers
from pytest_accel.hardware.sysfs import numa_node, read_number
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_AFFINITY, _HIERARCHY = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"
_PCI_ORDER, _SELECTOR = "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ONEAPI_DEVICE_SELECTOR"
_ONLY_TORCH_READS = (_PCI_ORDER, _SELECTOR, "SYCL_DEVICE_ALLOWLIST")
"""Variables whose values Intel's runtimes read; each has a language of its own."""
_NUMBERS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4})*|-1", re.ASCII)
_SCRIPT = f"from {__name__} import seen_by_torch; print(*seen_by_torch())"
_TIMEOUT = 60.0
"""Seconds for a process to import torch and to initialise its devices."""
_INTEL = 0x8086
_LMEM = "lmem_total_bytes"
_CARD = re.compile(r"card[0-9]+", re.ASCII)
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
# intel-gpu-tools (lib/igt_device_scan.h): an integrated GPU always has this address.
_INTEGRATED = "0000:00:02.0"
_PCI_IDS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")


class _Card(NamedTuple):
    """The properties of a GPU that affect the meaning of masks."""

    discrete: bool = True
    tiles: int = 1


def seen_by_torch() -> list[str]:
    """Return the PCI address of each device that torch sees in this process; ``?`` if it does not know the address."""
    import torch

    if torch.xpu.device_count():
        # Before it is initialised, torch may count by Sysman, which has another order (torch-xpu-ops issue 5015).
        torch.xpu.init()
    properties = [torch.xpu.get_device_properties(index) for index in range(torch.xpu.device_count())]
    return [address_in(bytes(getattr(torch_api.device_uuid(one), "bytes", b""))) or "?" for one in properties]


def ask_torch(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the PCI addresses that torch sees under `environ`, in its order; None if it does not answer.

    A temporary process asks it: initialising the driver in this process would break processes that are forked later.
    """
    try:
        done = subprocess.run(
            python_command(_SCRIPT, path=None),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            encoding="utf-8",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    addresses = tuple(done.stdout.split())
    return addresses if done.returncode == 0 and "?" not in addresses else None


class Xpu(BaseVendor):
    """The vendor of kind ``xpu``; a device is a whole card, its id is the PCI address.

    Its index is the driver's default number: discrete GPUs come first, then integrated ones, each by PCI address,
    and the driver keeps this order whatever the mask's order is. `root` contains ``usr`` too.
    """

    facts = KINDS["xpu"]

    def __init__(
        self,
        root: Path = Path("/"),
        ask: Callable[[Mapping[str, str]], tuple[str, ...] | None] = ask_torch,
    ) -> None:
        super().__init__(root)
        self._ask = ask
        self._cards: tuple[tuple[str, _Card], ...] = ()

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
        self._cards = tuple((one, _card(folders[one], one)) for one in products)
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
        """Return the devices that the masks leave, in the driver's order, which masks do not change.

        A list of numbers of whole cards is read here; for anything else, torch is asked in a temporary process. Even
        without a mask, integrated GPUs are left out beside discrete ones, as in torch.
        """
        known = {device.id: device for device in devices}
        if not known:
            return ()
        left = self._left(environ, self._counted(devices))
        return tuple(known[name] for name in dict.fromkeys(left) if name in known)

    def _left(self, environ: Mapping[str, str], cards: Sequence[tuple[str, _Card]]) -> list[str]:
        text = environ.get(_AFFINITY, "")
        text = "" if text == "default" else text
        set_here = [name for name in _ONLY_TORCH_READS if environ.get(name)]
        # Unless the hierarchy is COMPOSITE, numbers may be those of tiles.
        plain = _NUMBERS.fullmatch(text) and (
            environ.get(_HIERARCHY) == "COMPOSITE" or all(card.tiles == 1 for _, card in cards)
        )
        if set_here or (text and not plain):
            names = [*set_here, *([_AFFINITY] if text else [])]
            if (seen := self._ask(environ)) is not None:
                return list(seen)
            values = " and ".join(f"{name}={environ[name]!r}" for name in names)
            self._note(f"no device is used: only torch can read {values}, and it does not answer")
            return []
        counted = sorted(cards, key=lambda pair: not pair[1].discrete)
        if text:
            numbers = sorted({int(number) for number in text.split(",")})
            counted = [counted[number] for number in numbers if 0 <= number < len(counted)]
        discrete = [name for name, card in counted if card.discrete]
        if discrete:
            for name, card in counted:
                if not card.discrete:
                    self._note(f"{name} is integrated: torch ignores it, since there are discrete GPUs")
        return discrete or [name for name, _ in counted]

    def _note(self, text: str) -> None:
        self.notes = tuple(dict.fromkeys((*self.notes, text)))

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the driver's numbers; whole cards are devices, in the driver's default order.

        In that order an integrated GPU does not shift the numbers of discrete ones. In PCI order it would if the driver
        supports it, which sysfs does not show: GPUs before the 12th generation have another driver (compute-runtime,
        ``LEGACY_PLATFORMS.md``). ``-1`` hides every device (according to the driver's source code only), since an empty
        mask shows all.
        """
        return {_AFFINITY: write_numbers(devices) or "-1", _HIERARCHY: "COMPOSITE", _PCI_ORDER: None, _SELECTOR: None}

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Raise MaskError unless torch, built for XPU, sees exactly `devices`, at their addresses if torch has them.

        torch has addresses since pull request 161392 (2025). Names are not compared: sysfs has none, and the driver's
        names differ from those in the machine's list of products.
        """
        reason = f"; {lacking}" if (lacking := self.lacking()) else ""
        self.compare(_by_driver(devices), seen_by_torch(), environ, reason)

    def is_same(self, device: Device, seen: str) -> bool:
        return seen in ("?", device.id)

    def _counted(self, devices: Sequence[Device]) -> tuple[tuple[str, _Card], ...]:
        """Return the cards that the driver counts, in PCI order; `devices` if none can be discovered."""
        if not self._cards:
            self.discover()
        return self._cards or tuple((device.id, _Card()) for device in _by_driver(devices))

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


def _card(folder: Path, address: str) -> _Card:
    files = _memory_files(folder)
    tiles = len(list(folder.glob("gt/gt[0-9]*"))) if files == [folder / _LMEM] else len(files)
    return _Card(bool(files) or address != _INTEGRATED, max(tiles, 1))


def _memory_files(folder: Path) -> list[Path]:
    """Return the files with the size of the card's own memory: one for each tile under ``xe``, else one or none."""
    files = sorted((folder / "device").glob("tile[0-9]*/physical_vram_size_bytes"))
    return files or [file for file in (folder / _LMEM,) if file.exists()]


def _memory(folder: Path) -> int | None:
    """Return the size of the card's own memory; None if it is not reported."""
    sizes = [read_number(file) for file in _memory_files(folder)]
    return sum(size or 0 for size in sizes) if sizes and all(sizes) else None
