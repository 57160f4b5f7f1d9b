"""Intel GPUs, from what the kernel's drivers (``xe``, ``i915``) show in sysfs; Level Zero is not loaded.

``/sys/class/drm/cardN/device`` is the PCI device. Its own memory is told by ``xe`` in ``device/tileN/
physical_vram_size_bytes`` (kernel: ``drivers/gpu/drm/xe/xe_tile_sysfs.c``, on discrete GPUs only), and by Intel's
out-of-tree ``i915`` in ``cardN/lmem_total_bytes``; the kernel's own ``i915`` tells none. That the tiles of a GPU under
the out-of-tree ``i915`` are the folders ``cardN/gt/gtN`` is unverified. Nothing here was confirmed on an Intel GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_accel.core.device import Device, MaskError
from pytest_accel.hardware.order import by_figures, by_pci
from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.torch_build import built_for
from pytest_accel.hardware.vendors.xpu_mask import AFFINITY, HIERARCHY, PCI_ORDER, SELECTOR, Card, read_masks

_ALLOWLIST = "SYCL_DEVICE_ALLOWLIST"
_INTEL = 0x8086
_CARD = re.compile(r"card[0-9]+", re.ASCII)
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.ASCII)
# intel-gpu-tools (lib/igt_device_scan.h): the GPU of a processor always has this address.
_INTEGRATED = "0000:00:02.0"
# INTEL_PVC_IDS in the kernel's i915_pciids.h, and 0bd0 to 0bd2 of its first steppings.
_PONTE_VECCHIO = (0x0B69, 0x0B6E, *range(0x0BD0, 0x0BDC), 0x0BE0, 0x0BE1, 0x0BE5)
_PCI_IDS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")


@dataclass(frozen=True, slots=True)
class _Gpu:
    address: str
    product: int
    card: Card
    memory: int | None
    numa: int | None

    @property
    def place(self) -> tuple[int, ...]:
        match = _ADDRESS.fullmatch(self.address)
        return tuple(int(part, 16) for part in match.groups()) if match else ()


class Xpu:
    """The vendor of kind ``xpu``; a device is a whole card, its id is the PCI address.

    Its index is the number that the driver gives it by default: discrete GPUs first, then integrated ones, each by
    PCI address. `root` is where ``sys``, ``dev`` and ``usr`` are found.
    """

    kind = "xpu"
    mask_variables: tuple[str, ...] = (AFFINITY, SELECTOR)
    hardware = True
    backend: str | None = None
    ranks = True

    def __init__(self, root: Path = Path("/")) -> None:
        self.notes: tuple[str, ...] = ()
        self._root = root
        self._cards: tuple[tuple[str, Card], ...] = ()

    def lacking(self) -> str | None:
        """A build for XPU: every processor of Intel's with graphics is a device, which with another torch is none."""
        return None if "xpu" in built_for() else "torch is not built for XPU"

    def discover(self) -> tuple[Device, ...]:
        """Every GPU, in PCI order; left out, with a note, is one whose render node this process cannot open.

        Level Zero does not count such a GPU either. A file that cannot be read, or says what it never says, is a note.
        """
        notes: list[str] = []
        gpus: list[_Gpu] = []
        for folder in sorted((self._root / "sys/class/drm").glob("card*")):
            try:
                gpu = self._describe(folder, notes) if _CARD.fullmatch(folder.name) else None
            except (OSError, ValueError) as error:
                notes.append(f"{folder.name} is left out: {error}")
                continue
            if gpu:
                gpus.append(gpu)
        gpus.sort(key=lambda gpu: gpu.place)
        self.notes = tuple(notes)
        self._cards = tuple((gpu.address, gpu.card) for gpu in gpus)
        names = _product_names(self._root, {gpu.product for gpu in gpus})
        counted = sorted(gpus, key=lambda gpu: not gpu.card.discrete)
        return by_pci(
            [
                Device(
                    kind=self.kind,
                    id=gpu.address,
                    index=index,
                    name=names.get(gpu.product, f"Intel GPU {gpu.product:04x}"),
                    memory=gpu.memory,
                    pci=gpu.address,
                    numa=gpu.numa,
                )
                for index, gpu in enumerate(counted)
            ]
        )

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """As `read_masks`, in the driver's order, which masks do not change; a card is left where any tile of it is.

        Without a mask, too, integrated GPUs are left out where there are discrete ones, as torch leaves them out.
        """
        cards = self._counted(devices)
        reading = read_masks(environ, [card for _, card in cards])
        notes = [f"{name}={environ[name]!r} is nothing that Intel's runtimes can read" for name in reading.unreadable]
        notes += [f"{cards[at][0]} is integrated: torch leaves it out beside discrete GPUs" for at in reading.unused]
        notes += [f"{cards[at][0]} is taken whole, though only some of its tiles are left" for at in reading.partly]
        if _ALLOWLIST in environ:
            notes.append(f"{_ALLOWLIST} is left to SYCL: what it hides is counted here")
        self.notes = tuple(dict.fromkeys((*self.notes, *notes)))
        known = {device.id: device for device in devices}
        return tuple(known[cards[at][0]] for at in reading.left if cards[at][0] in known)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """By memory, then in PCI order: sysfs tells neither generation nor number of cores."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """``ZE_AFFINITY_MASK`` of the driver's numbers, with whole cards as devices, in the driver's default order.

        In that order an integrated GPU does not shift the numbers of discrete ones. In PCI order it would where the
        driver serves it, which sysfs does not tell: those before the 12th generation have a driver of their own
        (compute-runtime, ``LEGACY_PLATFORMS.md``). ``-1`` hides every device, for the empty mask shows all; what the
        driver makes of it is known from its source alone.
        """
        numbers = ",".join(str(device.index) for device in _by_driver(devices))
        return {AFFINITY: numbers or "-1", HIERARCHY: "COMPOSITE", PCI_ORDER: None, SELECTOR: None}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """``xpu:`` and the place among `devices` that the driver gives each, which is not its place in the session."""
        places = {device.id: place for place, device in enumerate(_by_driver(devices))}
        return tuple(f"xpu:{places[device.id]}" for device in devices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """MaskError unless torch, built for XPU, counts exactly `devices`, at their addresses where it tells them.

        torch tells them since pull request 161392 (2025). Names are not compared: sysfs has none, and the driver's are
        not those of the machine's list of products.
        """
        import torch

        count, reason = torch.xpu.device_count(), ""
        if "xpu" not in built_for():
            reason = f"; {self.lacking()}"
        elif count:
            # Before it is initialised, torch may ask Sysman, whose order is another (torch-xpu-ops issue 5015).
            torch.xpu.init()
            count = torch.xpu.device_count()
        properties = [torch.xpu.get_device_properties(index) for index in range(count)]
        seen = [address_in(bytes(getattr(getattr(one, "uuid", None), "bytes", b""))) for one in properties]
        compare([device.id for device in _by_driver(devices)], seen, environ, reason)

    def _counted(self, devices: Sequence[Device]) -> tuple[tuple[str, Card], ...]:
        """What the driver counts, in PCI order; where nothing is found, what it is asked about."""
        if not self._cards:
            self.discover()
        return self._cards or tuple((device.id, Card()) for device in _by_driver(devices))

    def _describe(self, folder: Path, notes: list[str]) -> _Gpu | None:
        device = folder / "device"
        try:
            vendor = int((device / "vendor").read_text(), 16)
        except FileNotFoundError:
            return None
        if vendor != _INTEL:
            return None
        address = os.path.basename(os.path.realpath(device))
        if not _ADDRESS.fullmatch(address):
            raise ValueError(f"{address!r} is no PCI address")
        driver = os.path.basename(os.path.realpath(device / "driver"))
        if driver not in ("i915", "xe"):
            raise ValueError(f"the driver of {address} is {driver!r}, which is neither i915 nor xe")
        nodes = [f"dev/dri/{node.name}" for node in sorted((device / "drm").glob("renderD*"))]
        if not any(os.access(self._root / node, os.R_OK | os.W_OK) for node in nodes):
            if address == _INTEGRATED and self.lacking():
                # Every container on a machine with such a processor is like this, and nobody asked for its graphics.
                return None
            raise ValueError(f"{address} has no render node that can be opened ({', '.join(nodes) or 'none at all'})")
        product = int((device / "device").read_text(), 16)
        files = sorted(device.glob("tile[0-9]*/physical_vram_size_bytes"))
        tiles = len(files)
        if not files and (folder / "lmem_total_bytes").exists():
            files = [folder / "lmem_total_bytes"]
            tiles = len(list(folder.glob("gt/gt[0-9]*")))
        sizes = [size for size in (_number(file, address, notes) for file in files) if size is not None and size > 0]
        numa = _number(device / "numa_node", address, notes)
        return _Gpu(
            address=address,
            product=product,
            card=Card(bool(files) or address != _INTEGRATED, max(tiles, 1), product in _PONTE_VECCHIO),
            memory=sum(sizes) if files and len(sizes) == len(files) else None,
            numa=numa if numa is not None and numa >= 0 else None,
        )


def make(argument: str | None) -> Xpu:
    """For ``--accel xpu``."""
    takes_none("xpu", argument)
    return Xpu()


def compare(ids: Sequence[str], seen: Sequence[str | None], environ: Mapping[str, str], reason: str = "") -> None:
    """MaskError unless `seen`, torch's devices by address, are `ids` in order; one without address is only counted."""
    pairs = zip(ids, seen, strict=False)
    if len(ids) == len(seen) and all(address in (None, name) for name, address in pairs):
        return
    told = [name for name in sorted(environ) if name.startswith("ZE_") or name in (SELECTOR, _ALLOWLIST)]
    variables = " ".join(f"{name}={environ[name]!r}" for name in told)
    raise MaskError(
        f"the process should see {len(ids)} xpu devices ({', '.join(ids) or 'none'}) but sees {len(seen)} "
        f"({', '.join(address or '?' for address in seen) or 'none'}); environment: {variables or 'no mask'}{reason}"
    )


def address_in(uuid: bytes) -> str | None:
    """The PCI address in a UUID of Level Zero's; None for one of another form.

    It has vendor, product, revision and PCI domain, two bytes each and the lower one first, then bus, device and
    function, four bytes of 0 and the tile (compute-runtime, ``Device::generateUuidFromPciBusInfo``); on some GPUs it is
    the chip's own number instead.
    """
    if len(uuid) != 16 or int.from_bytes(uuid[:2], "little") != _INTEL or any(uuid[11:15]):
        return None
    return f"{int.from_bytes(uuid[6:8], 'little'):04x}:{uuid[8]:02x}:{uuid[9]:02x}.{uuid[10]:x}"


def _by_driver(devices: Sequence[Device]) -> list[Device]:
    return sorted(devices, key=lambda device: device.index)


def _product_names(root: Path, products: Collection[int]) -> dict[int, str]:
    """What the machine's list of PCI products calls them, which is what stands in brackets: ``Intel Arc A770``."""
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


def _number(file: Path, address: str, notes: list[str]) -> int | None:
    """None where there is no such file, and, with a note, where it does not hold a number."""
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{address}: {file.parent.name}/{file.name} is not read: {error}")
        return None
