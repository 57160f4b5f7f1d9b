"""The GPU of a Mac with Apple silicon, which torch calls ``mps``; it is assumed to exist on every such Mac.

A torch for macOS on arm64 has Metal's backend built in, with one device (torch ``docs/source/notes/mps.rst``). No
variable hides the device, and no process group accepts its tensors (torch ``ProcessGroupGloo``), so ranks that name no
kind run on the CPU. This module has not been tested on such a machine.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

from pytest_accel.core.device import Device
from pytest_accel.hardware.vendors.base_vendor import BaseVendor


class Mps(BaseVendor):
    """The vendor of kind ``mps``."""

    def discover(self) -> tuple[Device, ...]:
        """Return the only device. Its memory is None, because it shares the machine's memory without a fixed part."""
        if (sys.platform, platform.machine()) != ("darwin", "arm64"):
            return ()
        return (Device(kind=self.kind, id="mps-0", index=0, name="Apple GPU"),)

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        import torch

        return ["mps"] if torch.backends.mps.is_available() else []
