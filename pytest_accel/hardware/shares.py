"""Parts of devices: what a share comes to on a device, in parts that are counted without rounding up."""

from __future__ import annotations

from pytest_accel.core.device import Device, Share

WHOLE = 1_000_000
"""The parts of a device."""
# So that 0.29 of a device, a little less than 29 hundredths in binary, is not one part short of it.
_ROUNDING = 1e-6


def parts(share: Share | None, device: Device) -> int | None:
    """How many of the `WHOLE` parts of `device` are `share` (None: all).

    A fraction is rounded down, so that N shares of 1/N fit; bytes are rounded up, so that no more is promised than is
    there. Of a device that serves one process at a time a share is all. None where `share` is in bytes and the device
    has less, or is one that could be shared if it told how much it has.
    """
    if share is None:
        return WHOLE
    if share.bytes is not None and device.memory is not None and share.bytes > device.memory:
        return None
    if device.single_process:
        return WHOLE
    if share.fraction is not None:
        return max(1, int(share.fraction * WHOLE + _ROUNDING))
    assert share.bytes is not None
    if not device.memory:
        return None
    return -(-share.bytes * WHOLE // device.memory)


def fraction(share: Share | None, device: Device) -> float:
    """The same as a fraction of the device's memory; 1.0 where it cannot be told."""
    return (parts(share, device) or WHOLE) / WHOLE
