"""The mark `needs`: its arguments, and the leases that a test with such marks takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from pytest_accel.core.device import Device, DeviceNeed
from pytest_accel.core.marks import MarkError, mark_text
from pytest_accel.core.units import parse_memory
from pytest_accel.core.world_key import DriverLeases, WorldKey
from pytest_accel.hardware.inventory import Machine
from pytest_accel.hardware.matching import shortfall


def leases(marks: tuple[pytest.Mark, ...], machine: Machine) -> DriverLeases:
    """Return the leases of a test with these `marks`, or why it can have none.

    For each name, the largest number in any mark counts.
    Raise :class:`MarkError` for an argument that is not allowed.
    """
    names = tuple(machine.resources)
    counts: dict[str, int] = {}
    for mark in marks:
        head = f"@pytest.mark.{mark_text(mark)}"
        if not names:
            raise MarkError(
                f"{head}: accel_resources, which names the resources of tests, is not set in the ini file; if the mark "
                "is the project's own, register it in markers"
            )
        given = [pair for argument in (*mark.args, mark.kwargs) for pair in _pairs(argument)]
        if not given:
            raise MarkError(f"{head}: needs at least one of {', '.join(names)}")
        for name, value in given:
            if name not in names:
                raise MarkError(
                    f"{head}: there is no resource {name!r} in accel_resources, allowed are {', '.join(names)}"
                )
            count = _count(f"{head}: {name}", value, machine.of(name).devices[0])
            counts[name] = max(count, counts.get(name, 0))
    # Sorted by name: all tests request their leases in one order.
    needs = {name: DeviceNeed(count, kind=name) for name, count in sorted(counts.items())}
    keys = tuple(WorldKey(name, need, 0, grouped=False) for name, need in needs.items())
    missing = filter(None, (shortfall(need, machine.of(name)) for name, need in needs.items()))
    return DriverLeases(keys, "; ".join(missing) or None, marks)


def _pairs(argument: Any) -> list[tuple[Any, object]]:
    """Return the names in an argument, each with its number, or with None if the argument is only a name."""
    return list(argument.items()) if isinstance(argument, Mapping) else [(argument, None)]


def _count(head: str, value: object, device: Device) -> int:
    """Return how many devices like `device` the `value` of a name stands for; `head` begins the text of an error."""
    allowed = "an int >= 1"
    if device.memory is not None:
        allowed = 'a positive size such as "8GiB", a positive int of bytes'
        with suppress(ValueError):
            return -(-parse_memory(value) // device.memory)
    elif value is None:
        return 1
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise MarkError(f"{head} must be {allowed}, got {value!r}")
