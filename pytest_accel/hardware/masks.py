"""Parsing and writing of visibility masks: ids and indices as the CUDA driver reads them, and lists of numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from pytest_accel.core.device import Device

_STRTOUL = re.compile(r"([+-]?)0*([0-9]+)", re.ASCII)
_MAX_DIGITS = 640
"""Maximum number of digits that int() accepts with any limit (``PYTHONINTMAXSTRDIGITS``)."""
_UUID_FORMS = ("GPU-", "MIG-")
_DIGITS = 9
"""Maximum number of digits of a device's number, few enough for `int`."""


def write_mask(devices: Sequence[Device]) -> str:
    """Return the mask for `devices`: full ids separated by commas; the empty string hides every device."""
    return ",".join(device.id for device in devices)


def is_index_mask(text: str) -> bool:
    """Return whether `text` is a CUDA mask of indices, whose meaning depends on CUDA's order of devices."""
    return not text.startswith(_UUID_FORMS) and _index(text.split(",")[0]) is not None


def read_cuda_mask(
    text: str | None, devices: Sequence[Device], cards: Sequence[str] | None = None
) -> tuple[Device, ...]:
    """Return those of `devices` that ``CUDA_VISIBLE_DEVICES=text`` leaves, in the mask's order.

    The grammar is that of the CUDA programming guide ("CUDA Environment Variables"); where the guide is silent, it
    follows measurements with torch 2.13. None leaves all devices, ``""`` none. The first entry decides the form of all:
    indices, ``GPU-`` ids or ``MIG-`` ids. The list ends before the first entry that has another form, that is an index
    below 0 or out of range, or that is the start of no id or of several. A repeated device empties the set. Indices are
    parsed like C's ``strtoul``: ``1gpu2`` is 1 and ``0x2`` is 0.

    An index or a ``GPU-`` id names a whole card. A card in MIG mode stands for all its instances: a process would see
    only the first, but the session may lease all of them. `cards` has the ids of the whole cards in CUDA's order; None:
    the order of `devices`. The two differ if CUDA counts cards that are not in `devices`.
    """
    if text is None:
        return tuple(devices)
    if cards is None:
        cards = tuple(dict.fromkeys(device.parent or device.id for device in devices))
    form = next((form for form in _UUID_FORMS if text.startswith(form)), "")
    entries: list[str | int] = []
    for entry in text.split(","):
        named = entry if form else _index(entry)
        if named in entries:
            return ()
        if named is None or not entry.startswith(form):
            break
        entries.append(named)
    ids = [device.id for device in devices if device.id.startswith(form)] if form == "MIG-" else cards
    names: list[str] = []
    for named in entries:
        fits = ids[named : named + 1] if isinstance(named, int) else _fitting(named, ids)
        if len(fits) != 1:
            break
        if fits[0] in names:
            return ()
        names += fits
    return tuple(device for name in names for device in devices if name in (device.id, device.parent))


def read_simple_mask(text: str | None, devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return those of `devices` that a mask of full ids or indices leaves, in the mask's order.

    None leaves all, ``""`` none. An entry that names no device ends the list; a repeated device empties the set.
    """
    if text is None:
        return tuple(devices)
    by_name = {str(index): device for index, device in enumerate(devices)}
    by_name.update({device.id: device for device in devices})
    seen: list[Device] = []
    for entry in text.split(","):
        device = by_name.get(entry.strip())
        if device is None:
            break
        if device in seen:
            return ()
        seen.append(device)
    return tuple(seen)


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


def pick_numbers(wanted: Sequence[int], devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices with the numbers `wanted`, in that order, up to the first number that no device has."""
    by_number = {device.index: device for device in devices}
    existing = takewhile(by_number.__contains__, wanted)
    return tuple(by_number[number] for number in existing)


def numbers(devices: Sequence[Device]) -> list[int]:
    """Return the numbers of `devices`, ascending."""
    return sorted(device.index for device in devices)


def write_numbers(devices: Sequence[Device]) -> str:
    """Return the numbers of `devices`, ascending and separated by commas."""
    return ",".join(map(str, numbers(devices)))


def rotate(devices: Sequence[Device], n: int) -> tuple[Device, ...]:
    """Return `devices`, rotated so that number `n` is first: each worker gets all, with another one first."""
    start = n % len(devices) if devices else 0
    return (*devices[start:], *devices[:start])


def _index(entry: str) -> int | None:
    """Return the number at the start of `entry`, or None if there is none or it is negative."""
    match = _STRTOUL.match(entry.strip())
    if match is None:
        return None
    sign, digits = match.groups()
    number = int(digits[:_MAX_DIGITS])
    return None if sign == "-" and number else number


def _fitting(start: str, ids: Sequence[str]) -> list[str]:
    """Return the id `start`, or, if there is none, the ids that start with it."""
    return [start] if start in ids else [name for name in ids if name.startswith(start)]
