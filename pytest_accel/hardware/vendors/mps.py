"""The GPU of a Mac with Apple silicon, which torch calls ``mps``; nothing is asked to find it.

A torch for macOS on arm64 has Metal's backend built in, and one device (torch ``docs/source/notes/mps.rst``). No
variable hides it, and no process group takes its tensors (torch ``ProcessGroupGloo``), so ranks that
name no kind run on the CPU. Not confirmed on such a machine.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence

from pytest_accel.core.device import Device, MaskError
from pytest_accel.hardware.registry import takes_none


class Mps:
    """The vendor of kind ``mps``. `system` is as in `sys.platform`, `machine` as in `platform.machine`."""

    kind = "mps"
    mask_variables: tuple[str, ...] = ()
    hardware = True
    backend: str | None = "gloo"
    ranks = False

    def __init__(self, system: str = sys.platform, machine: str | None = None) -> None:
        self.notes: tuple[str, ...] = ()
        self._system = system
        self._machine = platform.machine() if machine is None else machine

    def lacking(self) -> str | None:
        """Nothing that could be known without loading torch: every build for such a machine has the backend."""
        return None

    def discover(self) -> tuple[Device, ...]:
        """The one device. Its memory is the machine's own, of which no part is set aside for it: none is told."""
        if (self._system, self._machine) != ("darwin", "arm64"):
            return ()
        return (Device(kind=self.kind, id="mps-0", index=0, name="Apple GPU"),)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """All: there is no mask."""
        return tuple(devices)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """As they are: there is one."""
        return tuple(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Nothing: each process sees the device, also one whose lease has none."""
        return {}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """``mps``."""
        return ("mps",) * len(devices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """MaskError where a device is leased that torch cannot use."""
        import torch

        compare(len(devices), torch.backends.mps.is_built(), torch.backends.mps.is_available())


def make(argument: str | None) -> Mps:
    """For ``--accel mps``."""
    takes_none("mps", argument)
    return Mps()


def compare(leased: int, built: bool, available: bool) -> None:
    """MaskError unless torch can use as many devices as are `leased`; no variable has a say in it."""
    if leased and not available:
        reason = "this macOS cannot" if built else "this torch was built without it"
        raise MaskError(f"the process should see 1 mps device (mps-0) but torch cannot use it: {reason}")
