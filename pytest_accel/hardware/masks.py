"""Parsing and writing of visibility masks: ids and indices as the CUDA driver reads them, and lists of numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_accel.core.device import Device

_STRTOUL = re.compile(r"([+-]?)0*([0-9]+)", re.ASCII)
_MAX_DIGITS = 640
"""Maximum number of digits that int() accepts with any limit (``PYTHONINTMAXSTRDIGITS``)."""
_UUID_FORMS = ("GPU-", "MIG-")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,3}", re.ASCII)


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


def read_list(text: str, devices: Sequence[Device]) -> tuple[Device, ...] | None:
    """Return those of `devices` that a list of ids and numbers (`Device.index`) names, in its order: ``2,0``.

    The empty text and ``-1`` name none, numbers that no device has are ignored, and a repetition counts once. Return
    None if `text` is no such list: what else a runtime makes of it, only the runtime knows.
    """
    if text in ("", "-1"):
        return ()
    by_name = {str(device.index): device for device in devices} | {device.id: device for device in devices}
    entries = text.split(",")
    if not all(entry in by_name or _NUMBER.fullmatch(entry) for entry in entries):
        return None
    return tuple(dict.fromkeys(by_name[entry] for entry in entries if entry in by_name))


def write_numbers(devices: Sequence[Device]) -> str:
    """Return the numbers of `devices`, ascending and separated by commas."""
    return ",".join(map(str, sorted(device.index for device in devices)))


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
