"""Comparison of a test's requirements for devices with the devices of a session."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import NamedTuple

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.kinds import KINDS, published
from pytest_accel.core.units import count_text, format_capability, format_memory
from pytest_accel.hardware.inventory import Inventory, grouped, masked, skipped
from pytest_accel.hardware.shares import WHOLE, parts


class _Requirement(NamedTuple):
    """One requirement that each device has to meet."""

    text: str
    """Its description, which follows "with" in a sentence: ``>= 40 GiB``."""
    is_met: Callable[[Device], bool]
    in_need: bool = True
    """True if the description of the need (`in_words`) names it in these words."""


def candidates(need: DeviceNeed, inventory: Inventory) -> tuple[Device, ...]:
    """Return the devices that can meet `need`, in the session's order.

    An unknown property (such as memory) counts as missing. Slices (MIG) are left out if more than one device is needed,
    since CUDA shows a process at most one slice.
    """
    if need.kind not in (None, inventory.kind):
        return ()
    requirements = _requirements(need)
    return tuple(device for device in inventory.devices if all(one.is_met(device) for one in requirements))


def shortfall(need: DeviceNeed, inventory: Inventory) -> str | None:
    """Return, in one sentence, why `inventory` can never meet `need`; None if it can once its devices are free."""
    able = candidates(need, inventory)
    # A device may be in several sets of `need` if it has as many shares, but only once in each set.
    places = sum(min(need.sets, WHOLE // (parts(need.share, device) or WHOLE)) for device in able)
    if places >= need.count and len(able) >= need.count // need.sets:
        return None
    kind = need.kind or inventory.kind
    needs = f"needs {in_words(need, kind)}"
    # The devices of an inventory of another kind are irrelevant.
    there = inventory.devices if need.kind in (None, inventory.kind) else ()
    if not there:
        return f"{needs}; {_nothing(kind, inventory)}"

    def capability(device: Device) -> str:
        return format_capability(device.capability) if need.capability and device.capability else ""

    text = f"{needs}; there {'is' if len(there) == 1 else 'are'} {len(there)}: {grouped(there, capability)}"
    met = [(sum(map(one.is_met, there)), one.text) for one in _requirements(need)]
    short = [(count, requirement) for count, requirement in met if count < len(there)]
    if len(short) > 1:
        short.append((len(able), "all of it"))
    text += "".join(f", {f'{count} of them' if count else 'none'} with {requirement}" for count, requirement in short)
    if inventory.visible < inventory.present or inventory.outer:
        text += f" ({', '.join(masked(inventory))})"
    return "; ".join([text, *(skipped(inventory) if need.kind in (None, inventory.kind) else ())])


def in_words(need: DeviceNeed, kind: str) -> str:
    """Return `need` as text: ``2 cuda devices with >= 40 GiB``. `kind` is the session's, ``none`` if it has none."""
    count = counted(need.count, need.kind or kind)
    requirements = [one.text for one in _requirements(need) if one.in_need]
    return f"{_share_of(need)}{count}{' with ' if requirements else ''}{' and '.join(requirements)}"


def counted(count: int, kind: str) -> str:
    """Return a number of devices, CPU cores or named resources: ``2 cuda devices``, ``1 license``, ``2 x license``."""
    if (word := {"cores": "CPU core", "memory": "memory part", "none": "device"}.get(kind)) is not None:
        return count_text(count, word)
    if kind in KINDS or kind in published():
        return count_text(count, f"{kind} device")
    return f"1 {kind}" if count == 1 else f"{count} x {kind}"  # The name of a resource may have no plural: port-9000.


def _share_of(need: DeviceNeed) -> str:
    """Return the share in `need` as the start of a text (``0.25 of each of``); empty for whole devices."""
    if (share := need.share) is None:
        return ""
    amount = f"{share.fraction:g}" if share.bytes is None else format_memory(share.bytes)
    return f"{amount} of {'' if need.count == 1 else 'each of '}"


def _requirements(need: DeviceNeed) -> list[_Requirement]:
    found: list[_Requirement] = []
    memory, capability, name = need.memory, need.capability, need.name
    if memory is not None:
        found.append(_Requirement(f">= {format_memory(memory)}", lambda device: (device.memory or 0) >= memory))
    if capability is not None:
        text = f"capability >= {format_capability(capability)}"
        found.append(_Requirement(text, lambda device: (device.capability or ()) >= capability))
    if name is not None:
        found.append(_Requirement(f"name {name}", lambda device: fnmatchcase(device.name.lower(), name.lower())))
    if need.share is not None:
        found.append(_Requirement("so much memory", lambda device: parts(need.share, device) is not None, False))
    if need.count > 1:
        text = "a whole card (a process sees one MIG instance at most)"
        found.append(_Requirement(text, lambda device: device.parent is None, False))
    return found


def _nothing(kind: str, inventory: Inventory) -> str:
    """Return why there is no device of `kind`."""
    if kind == "none":
        return "there is no accelerator in this session"
    if inventory.present and inventory.kind == kind:
        reasons = "; ".join([*masked(inventory), *skipped(inventory)])
        return f"there is none to use: {reasons}" if reasons else "there is none to use"
    if kind == "sim":
        return "there is none: --accel sim:N makes some"
    return "there is none"
