"""Creation of the `Machine` that the settings of a session describe."""

from __future__ import annotations

from pytest_accel.hardware.device_order import parse_order
from pytest_accel.hardware.held_devices import held_here
from pytest_accel.hardware.inventory import Machine, parse_kind
from pytest_accel.settings.options import Settings


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
        resources=dict(settings.resources),
    )
