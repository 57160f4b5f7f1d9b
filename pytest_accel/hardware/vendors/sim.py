"""Simulated devices with their own mask variable, which make all steps of a lease possible without accelerators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pytest_accel.core.device import Device, Link, Near
from pytest_accel.core.kinds import KINDS, KindFacts
from pytest_accel.core.units import is_count, parse_capability, parse_memory
from pytest_accel.hardware.device_order import by_pci
from pytest_accel.hardware.masks import read_simple_mask, write_mask
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

(_MASK,) = KINDS["sim"].masks
_SHARED = ",shared"
"""Suffix of the argument of ``--accel``: the devices are shared with other sessions, by locks."""


class Sim(BaseVendor):
    """The vendor of kind ``sim``, with `count` plain devices, or those of a topology `file` (`read_topology`).

    Each session has devices of its own, unless they are `shared`: then sessions lock them like real devices.
    """

    facts = KINDS["sim"]

    def __init__(self, count: int = 0, file: Path | None = None, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        if file is None:
            self._devices = tuple(Device(kind="sim", id=f"sim-{n}", index=n, name="sim") for n in range(count))
        else:
            self._devices = by_pci(read_topology(file))

    @classmethod
    def make(cls, facts: KindFacts, argument: str | None) -> Sim:
        """Return the vendor for ``--accel sim:N`` or ``sim:FILE.toml``, each also with the suffix ``,shared``.

        Without an argument (None) there are no devices. Raise ValueError for any other argument.
        """
        if argument is None:
            return cls()
        source = argument.removesuffix(_SHARED)
        shared = source != argument
        if is_count(source):
            return cls(int(source), shared=shared)
        if source.endswith(".toml"):
            return cls(file=Path(source), shared=shared)
        raise ValueError(
            f"--accel sim:{argument}: allowed are sim:N, with N from 1, and sim:FILE.toml; either may end in {_SHARED}"
        )

    def discover(self) -> tuple[Device, ...]:
        """Return the configured devices; those of a topology file in PCI order."""
        return self._devices

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the devices that ``SIM_VISIBLE_DEVICES`` (ids or indices) leaves, in its order."""
        return read_simple_mask(environ.get(_MASK), devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the ids of `devices`."""
        return {_MASK: write_mask(devices)}

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        return [device.id for device in self.visible(self._devices, environ)]

    def is_same(self, device: Device, seen: str) -> bool:
        return seen == device.id


make = Sim.make


def read_topology(file: Path) -> tuple[Device, ...]:
    """Return the devices of a TOML file with a ``[[device]]`` table for each device. Every key is optional.

    The keys are ``name``, ``memory`` (``"80GiB"`` or bytes), ``capability`` (``"9.0"``), ``numa``, ``pci``, ``speed``,
    and ``links = [{to = 1, via = "nvlink"}]``, where ``to`` is the number of a table, from 0; a link counts in both
    directions. Raises ValueError for any other content, naming the file, the table, the key and the allowed values.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"sim topology {file}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"sim topology {file}: is not a TOML file: {error}") from None
    tables = data.get("device")
    if set(data) != {"device"} or not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise ValueError(f"sim topology {file}: allowed are [[device]] tables, and nothing else")
    figures = [_figures(f"sim topology {file}, device {index}", table) for index, table in enumerate(tables)]
    links: list[list[Link]] = [[] for _ in tables]
    for index, table in enumerate(tables):
        for to, via in _links(f"sim topology {file}, device {index}", table.get("links", []), index, len(tables)):
            links[index].append(Link(f"sim-{to}", via))
            links[to].append(Link(f"sim-{index}", via))
    return tuple(
        Device(kind="sim", id=f"sim-{index}", index=index, **{"name": "sim", **own}, links=tuple(dict.fromkeys(ends)))
        for index, (own, ends) in enumerate(zip(figures, links, strict=True))
    )


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r}: allowed is a string")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r}: allowed is a number")
    return float(value)


def _node(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r}: allowed is a whole number from 0")
    return value


_KEYS: dict[str, Callable[[object], Any]] = {
    "name": _text,
    "memory": parse_memory,
    "capability": parse_capability,
    "numa": _node,
    "pci": _text,
    "speed": _number,
}


def _figures(where: str, table: Mapping[str, object]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for key, value in table.items():
        if key == "links":
            continue
        if key not in _KEYS:
            raise ValueError(f"{where}: unknown key {key!r}: allowed are {', '.join([*_KEYS, 'links'])}")
        try:
            figures[key] = _KEYS[key](value)
        except ValueError as error:
            raise ValueError(f"{where}, key {key!r}: {error}") from None
    if "memory" in figures:
        figures["memory_free"] = figures["memory"]
    return figures


def _links(where: str, value: Any, index: int, count: int) -> list[tuple[int, Near]]:
    others = [n for n in range(count) if n != index]
    links: list[tuple[int, Near]] = []
    for entry in value if isinstance(value, list) else [value]:
        whole = isinstance(entry, dict) and set(entry) == {"to", "via"}
        to: Any = entry["to"] if whole else None
        via: Any = entry["via"] if whole else None
        if type(to) is not int or to not in others or via not in get_args(Near):
            raise ValueError(
                f"{where}, key 'links': {entry!r}: allowed are {{to = N, via = V}} "
                f"with N the number of another device ({', '.join(map(str, others)) or 'there is none'}) "
                f"and V one of {', '.join(get_args(Near))}"
            )
        links.append((to, via))
    return links
