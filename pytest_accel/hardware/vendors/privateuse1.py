"""Accelerators that a package adds to torch as ``PrivateUse1`` and that no other kind covers.

Such a package has an entry point in the group ``torch.backends``, which torch calls when it is imported (torch
``__init__.py``, ``_import_device_backends``). `torch.accelerator` then lists the devices, but only in a process that
has imported torch and these packages, so a short process is asked. No variable that hides such a device is known:
every process sees all devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from pytest_accel.compat import torch_api
from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS, kinds
from pytest_accel.hardware.queries import ask_torch
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_OF_OTHER_KINDS = {"intel_extension_for_pytorch", *(kind.package for kind in KINDS.values())}
"""Top-level packages of entry points that belong to other kinds; torch has the kind ``xpu`` also without Intel's."""
_ASK = """
import torch
from pytest_accel.compat.torch_api import accelerator

kind, count = accelerator() or ("", 0)
name_of = getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind) if count else str
answer = [kind, [str(name_of(index)) for index in range(count)]]
"""


class PrivateUse1(BaseVendor):
    """The vendor of kind ``privateuse1``; a device's id is the backend's name for torch, a dash and its index."""

    def discover(self) -> tuple[Device, ...]:
        """Return the devices that torch lists in a short process, unless another kind has this backend.

        Loading torch takes a second or more, so no process is started unless an unknown backend is installed.
        """
        backends = ", ".join(unknown_backends())
        if not backends:
            return ()
        try:
            backend, names = ask_torch(_ASK, os.environ)
        except OSError as error:
            self.note(f"the devices of torch's backends ({backends}) are unknown: {error}")
            return ()
        if not names or backend in kinds():
            has = f"{backend}, which has a kind of its own" if names else "no accelerator"
            self.note(f"torch, with the backends ({backends}), has {has}")
            return ()
        # single_process, because it is not known whether two processes can use one device.
        return tuple(
            Device(kind=self.kind, id=f"{backend}-{index}", index=index, name=name, single_process=True)
            for index, name in enumerate(names)
        )

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return ``NAME:INDEX`` with the device's own index, since every process counts all devices."""
        return tuple(f"{device.id.rpartition('-')[0]}:{device.index}" for device in devices)

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        kind, count = torch_api.accelerator() or ("", 0)
        return [f"{kind}:{index}" for index in range(count)]


def unknown_backends() -> tuple[str, ...]:
    """Return the names of the installed entry points of ``torch.backends`` that do not belong to other kinds."""
    points = entry_points(group="torch.backends")
    return tuple(sorted({point.name for point in points if point.module.partition(".")[0] not in _OF_OTHER_KINDS}))
