"""Creation of the `Machine` that the settings of a session describe."""

from __future__ import annotations

from pytest_accel.core.held_devices import held_here
from pytest_accel.hardware.device_order import parse_order
from pytest_accel.hardware.inventory import Machine, parse_kind
from pytest_accel.settings.option_types import SMALLEST_MEMORY
from pytest_accel.settings.options import Settings

_MEMORY_PARTS = 64
"""Largest number of parts into which ``memory`` is divided. Each part that a test takes is a lock file."""


def machine_for(settings: Settings) -> Machine:
    """Return the machine with the kind, devices, order and treatment of busy devices in `settings`.

    If this process runs inside a rank, the machine has only the devices that the rank holds.

    Raise ValueError for a kind or an order that is not allowed.
    """
    order = parse_order(settings.order) if settings.order else None
    return Machine(
        parse_kind(settings.accel),
        settings.ids,
        order,
        skip_busy=settings.busy == "skip",
        held=held_here(),
        resources=resources_for(settings),
        slots=dict(settings.resources).get("cores"),
    )


def resources_for(settings: Settings) -> dict[str, int]:
    """Return the number of devices of each named resource; those of ``memory`` are parts of :func:`memory_part`."""
    counts = {name: count for name, count in settings.resources if name != "cores"}
    if "memory" in counts:
        counts["memory"] //= memory_part(counts["memory"])
    return counts


def memory_part(memory: int) -> int:
    """Return the bytes of one part of ``memory``: 1 GiB, doubled until there are at most `_MEMORY_PARTS` parts.

    So sessions that name different sizes mostly have equal parts.
    """
    part = SMALLEST_MEMORY
    while memory // part > _MEMORY_PARTS:
        part *= 2
    return part
