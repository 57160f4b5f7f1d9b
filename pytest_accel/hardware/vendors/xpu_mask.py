"""Intel's visibility masks, read layer by layer as Level Zero's driver and SYCL read them.

Sources: compute-runtime ``shared/source/execution_environment/execution_environment.cpp`` (``parseAffinityMask``,
``setDeviceHierarchyMode``, ``comparePciIdBusNumber``) and ``shared/source/helpers/string_helpers.h``; intel/llvm
``sycl/source/detail/device_filter.cpp`` and ``platform_impl.cpp``; torch ``c10/xpu/XPUFunctions.cpp`` (since torch 2.7,
pull request 144378). Nothing here was confirmed on an Intel GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AFFINITY, SELECTOR = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"
PCI_ORDER, HIERARCHY = "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ZE_FLAT_DEVICE_HIERARCHY"

# The start of a token is what C's functions read; base 0 knows 0x for 16 and 0 for 8.
_STOUL = re.compile(r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", re.ASCII)
_DECIMAL = re.compile(r"[ \t\n\v\f\r]*([+-]?)0*([0-9]+)", re.ASCII)
_DIGITS = 20
"""A longer decimal overflows every integer of C, and is refused before `int` has to read it."""

_BACKENDS = ("*", "level_zero", "opencl", "cuda", "hip", "native_cpu", "esimd_emulator", "host")
_NO_GPU = -1

Tiles = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """What the masks' meaning hangs on of one GPU."""

    discrete: bool = True
    tiles: int = 1
    flat: bool = False
    """Whether its driver shows tiles as devices where nothing says otherwise, as it does for Ponte Vecchio."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the masks leave, as positions in the cards that were given; a card is left where any tile of it is."""

    left: tuple[int, ...] = ()
    """What torch counts, in the order in which it counts: discrete GPUs where there are any, else integrated ones."""
    unused: tuple[int, ...] = ()
    """Integrated GPUs that the masks leave, and torch does not count beside discrete ones."""
    partly: tuple[int, ...] = ()
    """Cards of `left` that keep some of their tiles only."""
    unreadable: tuple[str, ...] = ()
    """Variables that make the driver or SYCL give up, so that nothing is left."""


@dataclass(frozen=True, slots=True)
class _Term:
    number: int | None
    """None: every GPU."""
    depth: int = 0
    """0 for a whole device, 1 for its tiles, 2 for parts of tiles."""
    tile: int | None = None
    """None: every tile."""


def read_masks(environ: Mapping[str, str], cards: Sequence[Card]) -> Reading:
    """What the environment leaves of `cards`, which are every GPU that the driver can open, in PCI order.

    The driver sorts (discrete GPUs first, unless ``ZE_ENABLE_PCI_ID_DEVICE_ORDER`` is a number other than 0), then its
    mask is applied, then SYCL's selector, whose numbers count what the mask left; at last torch drops integrated GPUs
    where discrete ones are left. ``SYCL_DEVICE_ALLOWLIST``, of patterns for names and versions, is not read.

    Where ``ZE_FLAT_DEVICE_HIERARCHY`` says nothing, the GPU that the driver opens first decides whether tiles are
    devices. It opens them in no certain order; here it is the first after sorting, which matters only where a Ponte
    Vecchio stands beside other models.
    """
    by_pci = _number(environ.get(PCI_ORDER, "")) not in (None, 0)
    order = sorted(range(len(cards)), key=lambda at: not by_pci and not cards[at].discrete)
    flat = environ.get(HIERARCHY) in ("FLAT", "COMBINED")
    if not flat and environ.get(HIERARCHY) != "COMPOSITE":
        flat = bool(order) and cards[order[0]].flat
    masked = read_affinity(environ.get(AFFINITY, ""), [cards[at].tiles for at in order], flat)
    if masked is None:
        return Reading(unreadable=(AFFINITY,))
    # What SYCL counts as a device: a tile where the hierarchy is flat, else what is left of a card.
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
    """The tiles that ``ZE_AFFINITY_MASK=text`` leaves of each card, whose numbers of `tiles` are in the driver's order.

    ``""`` and ``default`` are all. ``X`` is a card and ``X.Y`` a tile of it; where the hierarchy is `flat`, ``X`` is a
    tile, counted over all cards, and ``X.Y`` is skipped. The order says nothing; what is out of range is skipped, and
    so is ``-1``, which wraps to a large number. Numbers are read like C++'s ``std::stoul`` with base 0 (``0x2``,
    ``1gpu`` is 1) and cut to 32 bits. None: the driver ends with an exception (``x``, an empty entry, ``0.1.2``).
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
    """What ``ONEAPI_DEVICE_SELECTOR=text`` leaves of Level Zero's devices: for each, which of its `parts` (tiles).

    ``backend:device,device;...`` in any case of letters, a device being ``*``, ``gpu``, ``cpu``, ``fpga`` or a number,
    and ``.Y`` or ``.*`` after a number or ``*`` a tile of a device that has several. What any term accepts is left,
    less what a term with ``!`` discards, which discards whole devices; such terms come last, and alone they leave all
    else. The empty string is all. None: SYCL raises an exception.
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
    gone = {term.number for term in _for_level_zero(discarded)}
    return tuple(() if None in gone or at in gone else tuple(sorted(found)) for at, found in enumerate(left))


def _for_level_zero(terms: Sequence[tuple[str, _Term]]) -> list[_Term]:
    return [term for backend, term in terms if backend in ("*", "level_zero")]


def _parts(term: _Term, count: int) -> set[int]:
    if term.depth == 0:
        return set(range(count))
    # A device of one tile cannot be divided, and no part of a tile is a device of a driver of today.
    if term.depth > 1 or count < 2:
        return set()
    return set(range(count)) if term.tile is None else {term.tile} & set(range(count))


def _term(text: str) -> _Term | None:
    first, *rest = text.split(".")
    if not all((first, *rest)) or len(rest) > 2:
        return None
    if first in ("gpu", "cpu", "fpga"):
        return None if rest else _Term(None if first == "gpu" else _NO_GPU)
    number = None if first == "*" else _stoi(first)
    if first != "*" and number is None:
        return None
    every, tile = first == "*", None
    for depth, part in enumerate(rest):
        if part.startswith("*"):
            every = True
            continue
        value = _stoi(part)
        if every or value is None:
            return None
        tile = value if depth == 0 else tile
    return _Term(number, len(rest), tile)


def _split(text: str, separator: str) -> list[str]:
    """As compute-runtime's ``StringHelpers::split``: nothing stands after a separator at the end."""
    pieces = text.split(separator)
    return pieces[:-1] if not pieces[-1] else pieces


def _stoul(token: str) -> int | None:
    """``static_cast<uint32_t>(std::stoul(token, nullptr, 0))``; None where that throws."""
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


def _stoi(token: str) -> int | None:
    """``std::stoi(token)``; None where that throws."""
    value = _number(token)
    return value if value is not None and -(1 << 31) <= value < 1 << 31 else None


def _number(token: str) -> int | None:
    """The decimal number at the start, cut to `_DIGITS` digits; None where there is none."""
    match = _DECIMAL.match(token)
    return int(f"{match[1]}{match[2][:_DIGITS]}") if match else None
