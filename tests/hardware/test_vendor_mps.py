"""Tests of the kind `mps` (Apple GPU)."""

from __future__ import annotations

import pytest

from pytest_accel.core.device import Device, MaskError
from pytest_accel.hardware.vendors.mps import Mps, check

DEVICE = Device(kind="mps", id="mps-0", index=0, name="Apple GPU")


def test_a_mac_with_apple_silicon_has_one_device() -> None:
    vendor = Mps("darwin", "arm64")
    assert (vendor.hardware, vendor.backend, vendor.lacking(), vendor.notes) == (True, "gloo", None, ())
    assert vendor.discover() == (DEVICE,)
    assert vendor.torch_devices(vendor.discover()) == ("mps",)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "arm64"), ("linux", "aarch64")])
def test_other_machines_have_no_device(system: str, machine: str) -> None:
    assert Mps(system, machine).discover() == ()


def test_verification_asks_torch() -> None:
    check(1, True, True)
    check(0, False, False)
    with pytest.raises(MaskError, match=r"should see 1 mps device .* built without it"):
        check(1, False, False)
    with pytest.raises(MaskError, match="this macOS cannot"):
        check(1, True, False)
