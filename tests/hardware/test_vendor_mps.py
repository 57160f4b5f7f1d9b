"""Tests of the kind `mps` (Apple GPU)."""

from __future__ import annotations

import platform
import sys

import pytest

from pytest_accel.core.device import Device, MaskError, Vendor
from pytest_accel.hardware.vendors.mps import Mps, check, make

ON_APPLE_SILICON = (sys.platform, platform.machine()) == ("darwin", "arm64")
DEVICE = Device(kind="mps", id="mps-0", index=0, name="Apple GPU")


def test_a_mac_with_apple_silicon_has_one_device() -> None:
    vendor = Mps("darwin", "arm64")
    assert isinstance(vendor, Vendor)
    assert (vendor.hardware, vendor.backend, vendor.lacking(), vendor.notes) == (True, "gloo", None, ())
    assert vendor.discover() == (DEVICE,)
    assert vendor.torch_devices(vendor.discover()) == ("mps",)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "x86_64"), ("linux", "arm64"), ("linux", "aarch64")])
def test_other_machines_have_no_device(system: str, machine: str) -> None:
    assert Mps(system, machine).discover() == ()


def test_this_machine_has_a_device_only_if_it_is_a_mac_with_apple_silicon() -> None:
    assert len(make(None).discover()) == ON_APPLE_SILICON


def test_no_variable_hides_the_device() -> None:
    vendor = Mps("darwin", "arm64")
    assert vendor.mask_variables == ()
    assert vendor.visible((DEVICE,), {"CUDA_VISIBLE_DEVICES": ""}) == vendor.fastest((DEVICE,)) == (DEVICE,)
    assert vendor.mask((DEVICE,), {}) == vendor.mask((), {}) == {}


def test_verification_asks_torch() -> None:
    check(1, True, True)
    check(0, False, False)
    with pytest.raises(MaskError, match=r"should see 1 mps device .* built without it"):
        check(1, False, False)
    with pytest.raises(MaskError, match="this macOS cannot"):
        check(1, True, False)


@pytest.mark.skipif(ON_APPLE_SILICON, reason="this machine has the device")
def test_verification_fails_if_this_torch_cannot_use_the_device() -> None:
    Mps().verify((), {})
    with pytest.raises(MaskError, match="torch cannot use it"):
        Mps().verify((DEVICE,), {})
