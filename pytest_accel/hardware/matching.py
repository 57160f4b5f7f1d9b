"""What a test asks of its devices against what a session has."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from pytest_accel.core.device import Device, DeviceNeed, Share
from pytest_accel.core.units import format_capability, format_memory
from pytest_accel.hardware.inventory import Inventory, grouped, masked, skipped
from pytest_accel.hardware.shares import WHOLE, parts


class _Filter(NamedTuple):
    asked: str
    """``>= 40 GiB``."""
    met: tuple[str, str]
    """What is said of one device, and of several, that pass: ``has enough memory``, ``have enough memory``."""
    passes: Callable[[Device], bool]


def candidates(need: DeviceNeed, inventory: Inventory) -> tuple[Device, ...]:
    """The devices that `need` can be met with, in the session's order.

    What a device does not tell (its memory, say) it does not have. A slice (MIG) serves only a need of one device,
    since CUDA shows a process one slice at most.
    """
    if need.kind not in (None, inventory.kind):
        return ()
    filters = _filters(need)
    return tuple(device for device in inventory.devices if all(one.passes(device) for one in filters))


def shortfall(need: DeviceNeed, inventory: Inventory) -> str | None:
    """Why `inventory` can never meet `need`, in one sentence; None where it can once its devices are free."""
    able = candidates(need, inventory)
    places = sum(min(need.sets, WHOLE // (parts(need.share, device) or WHOLE)) for device in able)
    if places >= need.count and len(able) >= need.count // need.sets:
        return None
    kind = need.kind or inventory.kind
    filters = _filters(need)
    asked = f"needs {in_words(need, kind)}"
    # A device count from another kind's inventory would say nothing about this one.
    there = inventory.devices if need.kind in (None, inventory.kind) else ()
    if not there:
        return f"{asked}; {_nothing(kind, inventory)}"

    def capability(device: Device) -> str:
        return format_capability(device.capability) if need.capability and device.capability else ""

    text = f"{asked}; there {'is' if len(there) == 1 else 'are'} {len(there)}: {grouped(there, capability)}"
    met = [(sum(map(one.passes, there)), one.met) for one in filters]
    short = [(count, said) for count, said in met if count < len(there)]
    if short:
        text += ", and " + ", ".join(_tell(count, said) for count, said in short)
    if len(short) > 1:
        text += ", " + _tell(len(able), ("meets all of it", "meet all of it"))
    if inventory.visible < inventory.present:
        text += f" ({', '.join(masked(inventory))})"
    return "; ".join([text, *(skipped(inventory) if need.kind in (None, inventory.kind) else ())])


def in_words(need: DeviceNeed, kind: str) -> str:
    """Return what is asked for: ``2 cuda devices with >= 40 GiB``. `kind` is the session's, ``none`` if it has none."""
    kind = need.kind or kind
    words = [str(need.count), *([] if kind == "none" else [kind]), "device" if need.count == 1 else "devices"]
    wishes = [one.asked for one in _filters(need) if one.asked]
    return f"{_asked_share(need)}{' '.join(words)}{' with ' if wishes else ''}{' and '.join(wishes)}"


def format_share(share: Share) -> str:
    """``0.25`` or ``8 GiB``."""
    return f"{share.fraction:g}" if share.bytes is None else format_memory(share.bytes)


def _asked_share(need: DeviceNeed) -> str:
    """``0.25 of each of``: what is asked of devices that are not asked for as a whole."""
    return f"{format_share(need.share)} of {'' if need.count == 1 else 'each of '}" if need.share else ""


def _filters(need: DeviceNeed) -> list[_Filter]:
    filters: list[_Filter] = []
    memory, capability, name = need.memory, need.capability, need.name
    if memory is not None:
        asked, met = f">= {format_memory(memory)}", ("has enough memory", "have enough memory")
        filters.append(_Filter(asked, met, lambda device: (device.memory or 0) >= memory))
    if capability is not None:
        asked, met = f"capability >= {format_capability(capability)}", ("has the capability", "have the capability")
        filters.append(_Filter(asked, met, lambda device: (device.capability or ()) >= capability))
    if name is not None:
        asked, met = f"name {name}", ("has the name", "have the name")
        filters.append(_Filter(asked, met, lambda device: fnmatchcase(device.name.lower(), name.lower())))
    if need.share is not None:
        met = ("has so much memory", "have so much memory")
        filters.append(_Filter("", met, lambda device: parts(need.share, device) is not None))
    if need.count > 1:
        alone = "(a process sees one MIG instance at most)"
        met = (f"is a whole device {alone}", f"are whole devices {alone}")
        filters.append(_Filter("", met, lambda device: device.parent is None))
    return filters


def _nothing(kind: str, inventory: Inventory) -> str:
    if kind == "none":
        return "there is no accelerator in this session"
    if inventory.present and inventory.kind == kind:
        reasons = "; ".join([*masked(inventory), *skipped(inventory)])
        return f"there is none to use: {reasons}" if reasons else "there is none to use"
    if kind == "sim":
        return "there is none: --accel sim:N makes some"
    return "there is none"


def _tell(count: int, said: tuple[str, str]) -> str:
    one, several = said
    if count == 0:
        return f"none {one}"
    return f"{count} of them {one if count == 1 else several}"
