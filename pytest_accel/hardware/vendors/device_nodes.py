"""What kinds have in common whose devices the system knows by number: nodes under ``/dev``, masks that list numbers.

A device's `index` is then the number by which masks name it. It travels with the device, so a rank reads and writes
masks without looking into the machine.
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
"""More than any number of a device has, and few enough for `int`."""


class Numbered:
    """A vendor whose devices are the nodes ``/dev/NAME<N>``, and whose one mask lists them by number.

    The number is a node's place among those that are there, from 0: a container that has only ``/dev/davinci3`` counts
    it as 0 (so does each of these runtimes as far as their documentation tells; unverified). A subclass says the rest.
    Masks are written in ascending order, and torch's numbers are places in it: right for a runtime that keeps the
    mask's order and for one that does not. `root` is where ``dev`` and ``sys`` are found.
    """

    kind: str
    hardware = True
    backend: str | None
    ranks = True
    mask_variables: tuple[str, ...]
    _package: str
    """What torch needs to use this kind."""
    _name: str
    _nodes: re.Pattern[str]
    """The names under ``/dev``; the first group is the number."""
    _hidden: str
    """The value of the mask that hides every device."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.notes: tuple[str, ...] = ()
        self._root = root

    def lacking(self) -> str | None:
        """The package that adds this kind to torch."""
        return not_installed(self._package)

    def discover(self) -> tuple[Device, ...]:
        """A device for each node; its id is its PCI address where sysfs tells one that no other node has."""
        found = nodes(self._root / "dev", self._nodes)
        addresses = {number: pci_address(self._root, name) for number, name in found.items()}
        told = list(addresses.values())
        devices = []
        for place, (number, pci) in enumerate(sorted(addresses.items())):
            own = pci if pci is not None and told.count(pci) == 1 else f"{self.kind}-{number}"
            numa = None if pci is None else numa_node(self._root, pci)
            devices.append(Device(kind=self.kind, id=own, index=place, name=self._name, pci=pci, numa=numa))
        return by_pci(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """What the mask leaves, in its order."""
        text = environ.get(self.mask_variables[0])
        return tuple(devices) if text is None else pick(self._read(text), devices)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """As they are in the machine: neither speed nor memory is told."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """The numbers, ascending."""
        return {self.mask_variables[0]: ",".join(map(str, numbers(devices))) if devices else self._hidden}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """``KIND:N``, where N is the device's place by number."""
        return by_place(self.kind, devices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """MaskError unless torch counts as many; nothing tells which they are."""
        compare(self.kind, devices, names_in_torch(self._package, self.kind), environ, self.mask_variables)

    def _read(self, text: str) -> list[int]:
        return read_numbers(text)


def not_installed(package: str) -> str | None:
    """``PACKAGE is not installed``, found out without importing it; None: it is. `package` has no dots."""
    return None if importlib.util.find_spec(package) is not None else f"{package} is not installed"


def nodes(folder: Path, name: re.Pattern[str]) -> dict[int, str]:
    """The names in `folder` that fit `name`, by the number that its first group is; folders do not count."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return {}
    fits = [(entry, match) for entry in entries if (match := name.fullmatch(entry.name)) and not entry.is_dir()]
    return {int(match.group(1)): entry.name for entry, match in fits}


def pci_address(root: Path, name: str) -> str | None:
    """The PCI address of the device whose node is called `name`, where any class of sysfs has it."""
    for link in sorted((root / "sys/class").glob(f"*/{name}/device")):
        address = link.resolve().name
        if _PCI.fullmatch(address):
            return address
    return None


def numa_node(root: Path, pci: str) -> int | None:
    """The NUMA node of a PCI address; None where sysfs tells none (-1: the machine has none)."""
    node = read_number(root / "sys/bus/pci/devices" / pci / "numa_node")
    return node if node is not None and node >= 0 else None


def read_text(file: Path) -> str:
    """What `file` says, without blanks around it; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(file: Path) -> int | None:
    """The whole number that `file` says, decimal or, with ``0x``, hexadecimal; None where it says none."""
    try:
        return int(read_text(file), 0)
    except ValueError:
        return None


def read_numbers(text: str) -> list[int]:
    """``0, 2,1`` is 0, 2, 1: what is no number ends the list, a repetition counts once, blanks are ignored."""
    found: list[int] = []
    for entry in text.split(","):
        token = entry.strip()
        if not (token.isascii() and token.isdecimal() and len(token) <= _DIGITS):
            break
        if int(token) not in found:
            found.append(int(token))
    return found


def pick(wanted: Sequence[int], devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with the numbers `wanted`, in that order, up to the first number that none has."""
    by_number = {device.index: device for device in devices}
    chosen: list[Device] = []
    for number in wanted:
        if number not in by_number:
            break
        chosen.append(by_number[number])
    return tuple(chosen)


def numbers(devices: Sequence[Device]) -> list[int]:
    """Their numbers, ascending."""
    return sorted(device.index for device in devices)


def by_place(name: str, devices: Sequence[Device]) -> tuple[str, ...]:
    """``NAME:N`` for each, where N is its place among `devices` by number."""
    places = numbers(devices)
    return tuple(f"{name}:{places.index(device.index)}" for device in devices)


def names_in_torch(package: str, name: str) -> list[str]:
    """The devices that ``torch.NAME`` counts once `package` is imported, which initialises the runtime."""
    importlib.import_module(package)
    import torch

    return [f"{name}:{index}" for index in range(getattr(torch, name).device_count())]


def compare(
    kind: str, devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str], variables: Sequence[str]
) -> None:
    """MaskError, with both and the `variables` that matter, unless the process sees as many as `devices`."""
    if len(seen) != len(devices):
        raise mismatch(kind, devices, seen, environ, variables)


def mismatch(
    kind: str, devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str], variables: Sequence[str]
) -> MaskError:
    """The process should see `devices` and sees what is called `seen`; `variables` of `environ` have a say in it."""
    ids = ", ".join(device.id for device in devices)
    mask = " ".join(f"{name}={environ[name]!r}" for name in variables if name in environ)
    return MaskError(
        f"the process should see {len(devices)} {kind} devices ({ids or 'none'}) "
        f"but sees {len(seen)} ({', '.join(seen) or 'none'}); environment: {mask or 'no mask'}"
    )


def names_in_xla() -> list[str]:
    """The devices that torch_xla has in this process, which initialises the runtime; its backend is registered."""
    count = importlib.import_module("torch_xla.runtime").addressable_device_count()
    # Importing it is what registers the backend.
    importlib.import_module("torch_xla.distributed.xla_backend")
    return [f"xla:{index}" for index in range(count)]
