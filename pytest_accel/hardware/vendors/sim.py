"""Simulated devices with their own mask variable, which make all steps of a lease possible without accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from pytest_accel.core.device import Device, Link, Near
from pytest_accel.core.kinds import KINDS, KindFacts
from pytest_accel.core.units import is_count, parse_capability, parse_memory
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import read_devices, write_mask
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

(_MASK,) = KINDS["sim"].masks
_SHARED = ",shared"
"""Suffix of the argument of ``--accel``: the devices are shared with other sessions, by locks."""


class Sim(BaseVendor):
    """The vendor of kind ``sim``: ``sim:N`` has plain devices, ``sim:FILE.toml`` those of a file (`read_topology`).

    Each session has devices of its own, unless the argument ends in ``,shared``: then sessions lock them like real
    devices. Without an argument there are no devices.
    """

    def __init__(self, facts: KindFacts, argument: str | None = None, root: Path = Path("/")) -> None:
        """Raise ValueError for any other argument."""
        super().__init__(facts, argument, root)
        source = (argument or "").removesuffix(_SHARED)
        self.shared = source != (argument or "")
        if argument is None or is_count(source):
            count = int(source or 0)
            self._devices = tuple(Device(kind="sim", id=f"sim-{n}", index=n, name="sim") for n in range(count))
        elif source.endswith(".toml"):
            self._devices = by_pci(read_topology(Path(source)))
        else:
            allowed = f"sim:N, with N from 1, and sim:FILE.toml; either may end in {_SHARED}"
            raise ValueError(f"--accel sim:{argument}: allowed are {allowed}")

    def discover(self) -> tuple[Device, ...]:
        """Return the configured devices; devices of a topology file are in PCI order."""
        return self._devices

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that ``SIM_VISIBLE_DEVICES`` (ids or numbers) leaves, in its order."""
        return read_devices(environ[_MASK], devices) or () if _MASK in environ else tuple(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the ids of `devices`."""
        return {_MASK: write_mask(devices)}

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        return [device.id for device in self.visible(self._devices, environ)]


class _Link(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of ``links``: the number of another table, from 0, and the kind of link."""

    to: int
    via: Near


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """A ``[[device]]`` table: ``memory`` as ``"80GiB"`` or bytes, ``capability`` as ``"9.0"``."""

    name: str = "sim"
    memory: str | int | None = None
    capability: str | None = None
    numa: int | None = None
    pci: str | None = None
    speed: float | None = None
    links: tuple[_Link, ...] = ()


class _Topology(msgspec.Struct, forbid_unknown_fields=True):
    device: tuple[_Table, ...]


def read_topology(file: Path) -> tuple[Device, ...]:
    """Return the devices of a TOML file with a ``[[device]]`` table for each device. Every key is optional.

    A link counts in both directions. Raise ValueError for any other content, naming the file and the place in it.
    """
    try:
        tables = msgspec.toml.decode(file.read_bytes(), type=_Topology).device
        links: list[list[Link]] = [[] for _ in tables]
        for index, table in enumerate(tables):
            for link in table.links:
                if not 0 <= link.to < len(tables):
                    raise ValueError(f"device {index} has a link to {link.to}: there are {len(tables)} devices")
                links[index].append(Link(f"sim-{link.to}", link.via))
                links[link.to].append(Link(f"sim-{index}", link.via))
        return tuple(_device(index, table, dict.fromkeys(links[index])) for index, table in enumerate(tables))
    except (OSError, ValueError) as error:
        raise ValueError(f"sim topology {file}: {error}") from None


def _device(index: int, table: _Table, links: Iterable[Link]) -> Device:
    memory = None if table.memory is None else parse_memory(table.memory)
    capability = None if table.capability is None else parse_capability(table.capability)
    own = {"memory": memory, "memory_free": memory, "capability": capability, "links": tuple(links)}
    return Device("sim", f"sim-{index}", index, **{**msgspec.structs.asdict(table), **own})
