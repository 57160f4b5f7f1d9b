"""Parsers of Intel's visibility masks, one for each layer: Level Zero's driver, SYCL and torch.

Sources: compute-runtime ``shared/source/execution_environment/execution_environment.cpp`` (``parseAffinityMask``,
``setDeviceHierarchyMode``, ``comparePciIdBusNumber``) and ``shared/source/helpers/string_helpers.h``; intel/llvm
``sycl/source/detail/device_filter.cpp`` and ``platform_impl.cpp``; torch ``c10/xpu/XPUFunctions.cpp`` (since torch 2.7,
pull request 144378). This module has not been tested on an Intel GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AFFINITY, SELECTOR = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
PCI_ORDER, HIERARCHY = "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ZE_FLAT_DEVICE_HIERARCHY"

# C's functions read a number at the start of a token; with base 0, the prefix 0x means base 16 and 0 means base 8.
_STOUL = re.compile(r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", re.ASCII)
_DIGITS = 20
"""A decimal number with more digits overflows every integer of C, so `int` need not read it."""

# A device, its tiles and the parts of a tile. No part may be a number below an asterisk.
_TERM = re.compile(
    r"gpu|cpu|fpga|\*(\.\*){0,2}|[0-9]{1,9}(\.\*){0,2}|[0-9]{1,9}\.[0-9]{1,9}(\.(\*|[0-9]{1,9}))?", re.ASCII
)
_BACKENDS = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "esimd_emulator", "host")
_NO_GPU = -1

Tiles = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """The properties of a GPU that affect the meaning of masks."""

    discrete: bool = True
    tiles: int = 1
    flat: bool = False
    """True if its driver shows tiles as devices by default, as for Ponte Vecchio."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The cards that the masks leave, as positions in the given cards; a card is left if any of its tiles is."""

    left: tuple[int, ...] = ()
    """The cards that torch counts, in its order: discrete GPUs if there are any, else integrated ones."""
    unused: tuple[int, ...] = ()
    """Integrated GPUs that the masks leave but torch does not count beside discrete ones."""
    partly: tuple[int, ...] = ()
    """Cards of `left` that keep only some of their tiles under the masks."""
    unreadable: tuple[str, ...] = ()
    """Variables that make the driver or SYCL fail, so that nothing is left."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A device in ``ONEAPI_DEVICE_SELECTOR``."""

    number: int | None
    """None: every GPU."""
    depth: int = 0
    """0 for a whole device, 1 for its tiles, 2 for parts of tiles."""
    tile: int | None = None
    """None: every tile."""


def read_masks(environ: Mapping[str, str], cards: Sequence[Card]) -> Reading:
    """Return what the environment leaves of `cards`: all GPUs that the driver can open, in PCI order.

    First the driver sorts the cards (discrete GPUs first, unless ``ZE_ENABLE_PCI_ID_DEVICE_ORDER`` is a number other
    than 0) and applies its mask. Then SYCL applies its selector, whose numbers count the devices that are left. Last,
    torch drops integrated GPUs if discrete ones are left. ``SYCL_DEVICE_ALLOWLIST``, which has patterns for names and
    versions, is not read.

    If ``ZE_FLAT_DEVICE_HIERARCHY`` does not decide it, the GPU that the driver opens first decides whether tiles are
    devices. The driver's order of opening is undefined; the first card after sorting is assumed, which matters only if
    a machine has both Ponte Vecchio and other models.
    """
    by_pci = _stoul(environ.get(PCI_ORDER, "")) not in (None, 0)
    order = sorted(range(len(cards)), key=lambda at: not by_pci and not cards[at].discrete)
    flat = environ.get(HIERARCHY) in ("FLAT", "COMBINED")
    if not flat and environ.get(HIERARCHY) != "COMPOSITE":
        flat = bool(order) and cards[order[0]].flat
    masked = read_affinity(environ.get(AFFINITY, ""), [cards[at].tiles for at in order], flat)
    if masked is None:
        return Reading(unreadable=(AFFINITY,))
    # The devices of SYCL: single tiles if the hierarchy is flat, else the remaining tiles of a card.
    slots: list[tuple[int, Tiles]] = [(at, tiles) for at, tiles in zip(order, masked, strict=True) if tiles]
    if flat:
        slots = [(at, (tile,)) for at, tiles in slots for tile in tiles]
    selected = read_selector(environ.get(SELECTOR, ""), [len(tiles) for _, tiles in slots])
    if selected is None:
        return Reading(unreadable=(SELECTOR,))
    kept: dict[int, int] = {}
    for (at, _), parts in zip(slots, selected, strict=True):
        if parts:
            kept[at] = kept.get(at, 0) + len(parts)
    discrete = tuple(at for at in kept if cards[at].discrete)
    left = discrete or tuple(kept)
    return Reading(
        left=left,
        unused=tuple(at for at in kept if at not in left),
        partly=tuple(at for at in left if kept[at] < cards[at].tiles),
    )


def read_affinity(text: str, tiles: Sequence[int], flat: bool) -> tuple[Tiles, ...] | None:
    """Return the tiles that ``ZE_AFFINITY_MASK=text`` leaves of each card, or None if the driver raises an exception.

    `tiles` has the number of tiles of each card, in the driver's order. ``""`` and ``default`` mean all. ``X`` is a
    card and ``X.Y`` a tile of it; if the hierarchy is `flat`, ``X`` is a tile, counted over all cards, and ``X.Y`` is
    ignored. The order of entries has no meaning. Entries out of range are ignored, also ``-1``, which wraps to a large
    number. Numbers are read like C++'s ``std::stoul`` with base 0 (``0x2``; ``1gpu`` is 1) and truncated to 32 bits.
    The driver raises an exception for ``x``, an empty entry or ``0.1.2``.
    """
    if text in ("", "default"):
        return tuple(tuple(range(count)) for count in tiles)
    places = [(card, tile) for card, count in enumerate(tiles) for tile in range(count)]
    left: list[set[int]] = [set() for _ in tiles]
    for entry in _split(text, ","):
        numbers = _split(entry, ".")
        first = _stoul(numbers[0]) if numbers else None
        if first is None:
            return None
        if first >= len(places if flat else tiles) or (flat and len(numbers) > 1):
            continue
        if flat:
            card, tile = places[first]
            left[card].add(tile)
        elif len(numbers) == 1:
            left[first].update(range(tiles[first]))
        else:
            second = _stoul(numbers[1])
            if second is None or (second < tiles[first] and len(numbers) > 2):
                return None
            left[first].update({second} & set(range(tiles[first])))
    return tuple(tuple(sorted(found)) for found in left)


def read_selector(text: str, parts: Sequence[int]) -> tuple[Tiles, ...] | None:
    """Return the tiles that ``ONEAPI_DEVICE_SELECTOR=text`` leaves of each Level Zero device.

    The result is None if SYCL raises an exception. `parts` has the number of tiles of each device. The form is
    ``backend:device,device;...``, case-insensitive. A device is ``*``, ``gpu``, ``cpu``, ``fpga`` or a number; ``.Y``
    or ``.*`` after a number or ``*`` is a tile of a device that has several. The result is what any term accepts,
    without the whole devices that terms with ``!`` discard. Such terms come last; if there are no other terms, all
    other devices are left. The empty string means all.
    """
    if not text:
        return tuple(tuple(range(count)) for count in parts)
    accepted: list[tuple[str, _Term]] = []
    discarded: list[tuple[str, _Term]] = []
    for entry in filter(None, text.lower().split(";")):
        discards = entry.startswith("!")
        backend, _, devices = entry.removeprefix("!").partition(":")
        if backend not in _BACKENDS or not devices or ":" in devices:
            return None
        for device in filter(None, devices.split(",")):
            term = _term(device)
            if term is None or (discarded and not discards):
                return None
            (discarded if discards else accepted).append((backend, term))
    if discarded and not accepted:
        accepted.append(("*", _Term(None)))
    left: list[set[int]] = [set() for _ in parts]
    for term in _for_level_zero(accepted):
        for at, count in enumerate(parts):
            if term.number in (None, at):
                left[at] |= _parts(term, count)
    removed = {term.number for term in _for_level_zero(discarded)}
    return tuple(() if None in removed or at in removed else tuple(sorted(found)) for at, found in enumerate(left))


def _for_level_zero(terms: Sequence[tuple[str, _Term]]) -> list[_Term]:
    return [term for backend, term in terms if backend in ("*", "level_zero")]


def _parts(term: _Term, count: int) -> set[int]:
    if term.depth == 0:
        return set(range(count))
    # A device with one tile cannot be divided, and no current driver has devices that are parts of a tile.
    if term.depth > 1 or count < 2:
        return set()
    return set(range(count)) if term.tile is None else {term.tile} & set(range(count))


def _term(text: str) -> _Term | None:
    if not _TERM.fullmatch(text):
        return None
    first, *rest = text.split(".")
    number = int(first) if first.isdecimal() else None if first in ("*", "gpu") else _NO_GPU
    return _Term(number, len(rest), int(rest[0]) if rest and rest[0] != "*" else None)


def _split(text: str, separator: str) -> list[str]:
    """Split like compute-runtime's ``StringHelpers::split``: a separator at the end adds no empty piece."""
    pieces = text.split(separator)
    return pieces[:-1] if not pieces[-1] else pieces


def _stoul(token: str) -> int | None:
    """Return ``static_cast<uint32_t>(std::stoul(token, nullptr, 0))``, or None if that throws."""
    match = _STOUL.match(token)
    if match is None:
        return None
    sign, digits = match.groups()
    if digits[0] != "0":
        value = int(digits) if len(digits) <= _DIGITS else 1 << 64
    else:
        value = int(digits, 16 if digits[1:2] in ("x", "X") else 8)
    if value >= 1 << 64:
        return None
    return (-value if sign == "-" else value) % (1 << 32)
