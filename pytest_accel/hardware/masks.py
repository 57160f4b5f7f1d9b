"""Parsing and writing of plain visibility masks. Only runtimes read other masks, see `BaseVendor.ask`."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from pytest_accel.core.device import Device


def write_mask(devices: Sequence[Device]) -> str:
    """Return the mask for `devices`: full ids separated by commas; the empty string hides every device."""
    return ",".join(device.id for device in devices)


def write_numbers(devices: Sequence[Device]) -> str:
    """Return the numbers of `devices`, ascending and separated by commas."""
    return ",".join(map(str, sorted(device.index for device in devices)))


def read_list(text: str, known: Container[str]) -> list[str] | None:
    """Return the entries of a list of different names that are all in `known`; empty for an empty text and ``-1``.

    Return None if `text` is no such list.
    """
    if text in ("", "-1"):
        return []
    entries = text.split(",")
    # Do not guess at other texts: runtimes differ in how they treat a part of an id, a wrong entry or a repetition.
    return entries if len({*entries}) == len(entries) and all(entry in known for entry in entries) else None


def read_devices(text: str, devices: Sequence[Device]) -> tuple[Device, ...] | None:
    """Return the devices that a list (`read_list`) of ids and numbers (`Device.index`) names; None for other texts."""
    by_name: Mapping[str, Device] = {
        **{str(device.index): device for device in devices},
        **{device.id: device for device in devices},
    }
    entries = read_list(text, by_name)
    found = None if entries is None else tuple(by_name[entry] for entry in entries)
    return None if found is None or len({*found}) < len(found) else found
