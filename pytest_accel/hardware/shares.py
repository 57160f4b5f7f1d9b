"""Conversion of shares of a device into a whole number of parts, which add up exactly."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_accel.core.device import Device, Share

WHOLE = 1_000_000
"""Number of parts of a device."""
_ROUNDING = 1e-6
"""Added before rounding down, since 0.29 in binary is slightly less than 29 hundredths and would lose one part."""


def parts(share: Share | None, device: Device) -> int | None:
    """Return the number of parts, out of `WHOLE`, of `device` that `share` takes; all if `share` is None.

    If only one process at a time can use the device, any share takes all parts. Return None if `share` is in bytes and
    the device has less memory, or its memory is unknown and it could be shared.
    """
    if share is None:
        return WHOLE
    if share.bytes is not None and device.memory is not None and share.bytes > device.memory:
        return None
    if device.single_process:
        return WHOLE
    if share.fraction is not None:
        # Rounded down, so that N shares of 1/N fit.
        return max(1, int(share.fraction * WHOLE + _ROUNDING))
    assert share.bytes is not None
    if not device.memory:
        return None
    # Rounded up, so that shares never exceed the memory.
    return -(-share.bytes * WHOLE // device.memory)


def with_parts(devices: Sequence[str], parts: Sequence[int]) -> tuple[tuple[str, int], ...]:
    """Return pairs of each of `devices` and its number of parts; whole devices if `parts` is empty."""
    return tuple(zip(devices, parts or (WHOLE,) * len(devices), strict=True))


def fraction(share: Share | None, device: Device) -> float:
    """Return `share` as a fraction of the device's memory; 1.0 if it cannot be computed."""
    return (parts(share, device) or WHOLE) / WHOLE
