"""The GPU of a Mac with Apple silicon, which torch calls ``mps``; it is assumed to exist on every such Mac.

A torch for macOS on arm64 has Metal's backend built in, with one device (torch ``docs/source/notes/mps.rst``). No
variable hides the device, and no process group accepts its tensors (torch ``ProcessGroupGloo``), so ranks that name no
kind run on the CPU. This module has not been tested on such a machine.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence

from pytest_accel.core.device import Device, MaskError
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.vendors.base_vendor import BaseVendor


class Mps(BaseVendor):
    """The vendor of kind ``mps``. `system` has the form of `sys.platform`, `machine` that of `platform.machine`."""

    facts = KINDS["mps"]

    def __init__(self, system: str = sys.platform, machine: str | None = None) -> None:
        super().__init__()
        self._system = system
        self._machine = platform.machine() if machine is None else machine

    def discover(self) -> tuple[Device, ...]:
        """Return the only device. Its memory is None, because it shares the machine's memory without a fixed part."""
        if (self._system, self._machine) != ("darwin", "arm64"):
            return ()
        return (Device(kind=self.kind, id="mps-0", index=0, name="Apple GPU"),)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """Raise MaskError if a device is leased that torch cannot use."""
        import torch

        check(len(devices), torch.backends.mps.is_built(), torch.backends.mps.is_available())


make = Mps.make


def check(leased: int, built: bool, available: bool) -> None:
    """Raise MaskError if the device is `leased` but torch cannot use it."""
    if leased and not available:
        reason = "this macOS cannot" if built else "this torch was built without it"
        raise MaskError(f"the process should see 1 mps device (mps-0) but torch cannot use it: {reason}")
