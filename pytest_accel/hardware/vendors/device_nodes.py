"""Helpers for kinds whose devices are numbered: nodes under ``/dev``, and masks that list numbers.

The `index` of such a device is the number that masks use. It is part of the device, so a rank can read and write masks
without inspecting the machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_accel.core.device import Device, MaskError
from pytest_accel.hardware.order import by_figures, by_pci

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
_DIGITS = 9
"""Maximum number of digits of a device's number, few enough for `int`."""


class NumberedVendor:
    """Base class of vendors whose devices are the nodes ``/dev/NAME<N>``, and whose only mask lists their numbers.

    The number of a device is the position of its node among the existing ones, from 0: in a container that has only
    ``/dev/davinci3``, this device has the number 0 (as in each of these runtimes, according to their documentation;
    unverified). Masks are written in ascending order, and torch's numbers are positions in it. This is correct for
    runtimes that keep the mask's order and for those that do not. `root` is the folder that contains ``dev`` and
    ``sys``.
    """

    kind: str
    hardware = True
    backend: str | None
    ranks = True
    mask_variables: tuple[str, ...]
    _package: str
    """The package that torch needs for this kind."""
    _name: str
    """Name of the devices for users."""
    _nodes: re.Pattern[str]
    """Pattern of the names under ``/dev``; the first group is the number."""
    _hidden: str
    """Value of the mask that hides every device."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.notes: tuple[str, ...] = ()
        self._root = root

    def lacking(self) -> str | None:
        """Return a text if the package that adds this kind to torch is not installed, else None."""
        return not_installed(self._package)

    def discover(self) -> tuple[Device, ...]:
        """Return a device for each node; its id is its PCI address if sysfs lists one that no other node has."""
        found = nodes(self._root / "dev", self._nodes)
        addresses = {number: pci_address(self._root, name) for number, name in found.items()}
        known = list(addresses.values())
        devices = []
        for index, (number, pci) in enumerate(sorted(addresses.items())):
            device_id = pci if pci is not None and known.count(pci) == 1 else f"{self.kind}-{number}"
            numa = None if pci is None else numa_node(self._root, pci)
            devices.append(Device(kind=self.kind, id=device_id, index=index, name=self._name, pci=pci, numa=numa))
        return by_pci(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that the mask leaves, in its order."""
        text = environ.get(self.mask_variables[0])
        return tuple(devices) if text is None else pick(self._read(text), devices)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return `devices` in PCI order: neither their speed nor their memory is known."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the numbers, ascending."""
        return {self.mask_variables[0]: ",".join(map(str, numbers(devices))) if devices else self._hidden}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return ``KIND:N`` for each device, where N is its position in ascending order of numbers."""
        return by_place(self.kind, devices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Raise MaskError unless torch counts as many devices; which ones they are cannot be found out."""
        compare(self.kind, devices, names_in_torch(self._package, self.kind), environ, self.mask_variables)

    def _read(self, text: str) -> list[int]:
        return read_numbers(text)


def not_installed(package: str) -> str | None:
    """Return ``PACKAGE is not installed``, or None if it is; `package` has no dots and is not imported."""
    return None if importlib.util.find_spec(package) is not None else f"{package} is not installed"


def nodes(folder: Path, name: re.Pattern[str]) -> dict[int, str]:
    """Return the names in `folder` that match `name`, by the number in its first group; subfolders are ignored."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return {}
    matching = [(entry, match) for entry in entries if (match := name.fullmatch(entry.name)) and not entry.is_dir()]
    return {int(match.group(1)): entry.name for entry, match in matching}


def pci_address(root: Path, name: str) -> str | None:
    """Return the PCI address of the device with the node `name`, from any device class in sysfs, or None."""
    for link in sorted((root / "sys/class").glob(f"*/{name}/device")):
        address = link.resolve().name
        if _PCI.fullmatch(address):
            return address
    return None


def numa_node(root: Path, pci: str) -> int | None:
    """Return the NUMA node of a PCI address; None if sysfs has none (or -1: the machine has no NUMA nodes)."""
    node = read_number(root / "sys/bus/pci/devices" / pci / "numa_node")
    return node if node is not None and node >= 0 else None


def read_text(file: Path) -> str:
    """Return the stripped text of `file`; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(file: Path) -> int | None:
    """Return the integer in `file`, decimal or, with ``0x``, hexadecimal; None if there is none."""
    try:
        return int(read_text(file), 0)
    except ValueError:
        return None


def read_numbers(text: str) -> list[int]:
    """Parse a list of numbers: ``0, 2,1`` is 0, 2, 1.

    An entry that is not a number ends the list, a repetition counts once, blanks are ignored.
    """
    found: list[int] = []
    for entry in text.split(","):
        token = entry.strip()
        if not (token.isascii() and token.isdecimal() and len(token) <= _DIGITS):
            break
        if int(token) not in found:
            found.append(int(token))
    return found


def pick(wanted: Sequence[int], devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices with the numbers `wanted`, in that order, up to the first number that no device has."""
    by_number = {device.index: device for device in devices}
    chosen: list[Device] = []
    for number in wanted:
        if number not in by_number:
            break
        chosen.append(by_number[number])
    return tuple(chosen)


def numbers(devices: Sequence[Device]) -> list[int]:
    """Return the numbers of `devices`, ascending."""
    return sorted(device.index for device in devices)


def by_place(name: str, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return ``NAME:N`` for each device, where N is its position among `devices` in ascending order of numbers."""
    places = numbers(devices)
    return tuple(f"{name}:{places.index(device.index)}" for device in devices)


def names_in_torch(package: str, name: str) -> list[str]:
    """Import `package` and return the devices that ``torch.NAME`` counts. This initialises the runtime."""
    importlib.import_module(package)
    import torch

    return [f"{name}:{index}" for index in range(getattr(torch, name).device_count())]


def compare(
    kind: str, devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str], variables: Sequence[str]
) -> None:
    """Raise MaskError unless the process sees as many devices as `devices`; the message has the `variables` too."""
    if len(seen) != len(devices):
        raise mismatch(kind, devices, seen, environ, variables)


def mismatch(
    kind: str, devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str], variables: Sequence[str]
) -> MaskError:
    """Return the MaskError of a process that should see `devices` but sees those named `seen`.

    `variables` are the names in `environ` that affect which devices are visible.
    """
    ids = ", ".join(device.id for device in devices)
    mask = " ".join(f"{name}={environ[name]!r}" for name in variables if name in environ)
    return MaskError(
        f"the process should see {len(devices)} {kind} devices ({ids or 'none'}) "
        f"but sees {len(seen)} ({', '.join(seen) or 'none'}); environment: {mask or 'no mask'}"
    )


def names_in_xla() -> list[str]:
    """Return the devices of torch_xla in this process and register its backend. This initialises the runtime."""
    count = importlib.import_module("torch_xla.runtime").addressable_device_count()
    # The import registers the backend.
    importlib.import_module("torch_xla.distributed.xla_backend")
    return [f"xla:{index}" for index in range(count)]
