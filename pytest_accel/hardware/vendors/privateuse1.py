"""Accelerators that a package adds to torch as ``PrivateUse1`` and that no other kind covers.

Such a package has an entry point in the group ``torch.backends``, which torch calls when it is imported (torch
``__init__.py``, ``_import_device_backends``). `torch.accelerator` then lists the devices, but only in a process that
has imported torch and these packages, so a temporary process is asked. No variable that hides such a device is known:
every process sees all devices.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from pytest_accel.core import torch_api
from pytest_accel.core.device import Device
from pytest_accel.core.interpreter import python_command
from pytest_accel.core.kinds import KINDS, kinds
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_GROUP = "torch.backends"
_OF_OTHER_KINDS = {package for kind in KINDS.values() for package in (kind.package, kind.other_package)}
"""Top-level packages of entry points that belong to other kinds."""
_TIMEOUT = 60.0
"""Seconds."""
_ASK = """
import json
import torch
from pytest_accel.core.torch_api import accelerator

kind, count = accelerator() or (None, 0)
names = []
module = None if kind is None else torch.get_device_module(kind)
for index in range(count):
    try:
        names.append(str(module.get_device_name(index)))
    except Exception:
        names.append(kind)
print()
print(json.dumps([kind, names]))
"""


class PrivateUse1(BaseVendor):
    """The vendor of kind ``privateuse1``; a device's id is the backend's name for torch, a dash and its index."""

    facts = KINDS["privateuse1"]
    _found: tuple[Device, ...] | None = None

    def discover(self) -> tuple[Device, ...]:
        """Return the devices that torch lists in a temporary process, unless another kind has this backend.

        The process runs once at most. Loading torch takes a second or more, so no process is started unless an unknown
        backend is installed.
        """
        if self._found is None:
            names = unknown_backends()
            self._found = self._ask(", ".join(names)) if names else ()
        return self._found

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """Return ``NAME:INDEX`` with the device's own index, since every process counts all devices."""
        return tuple(f"{device.id.rpartition('-')[0]}:{device.index}" for device in devices)

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        kind, count = torch_api.accelerator() or ("", 0)
        return [f"{kind}:{index}" for index in range(count)]

    def compare(
        self, devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str], reason: str = ""
    ) -> None:
        """Raise MaskError unless each of `devices` is in `seen`: no mask hides the others."""
        if not set(self.torch_devices(devices)) <= set(seen):
            raise self.mismatch(devices, seen, environ, reason)

    def _ask(self, names: str) -> tuple[Device, ...]:
        try:
            backend, found = ask_torch()
        except OSError as error:
            self.notes = (f"the devices of torch's backends ({names}) are unknown: {error}",)
            return ()
        if backend is None or backend in kinds() or not found:
            has = "no accelerator" if backend is None or not found else f"{backend}, which has a kind of its own"
            self.notes = (f"torch, with the backends ({names}), has {has}",)
            return ()
        # single_process, because it is not known whether two processes can use one device.
        return tuple(
            Device(kind=self.kind, id=f"{backend}-{index}", index=index, name=name, single_process=True)
            for index, name in enumerate(found)
        )


make = PrivateUse1.make


def unknown_backends() -> tuple[str, ...]:
    """Return the names of the installed entry points of ``torch.backends`` that do not belong to other kinds."""
    points = entry_points(group=_GROUP)
    return tuple(sorted({point.name for point in points if point.module.partition(".")[0] not in _OF_OTHER_KINDS}))


def ask_torch(timeout: float = _TIMEOUT) -> tuple[str | None, list[str]]:
    """Return the type of torch's accelerator and the names of its devices, from a temporary process.

    Raises OSError, with the last line of its stderr, if the process fails, or if it does not answer within `timeout`
    seconds.
    """
    try:
        done = subprocess.run(
            python_command(_ASK, path=sys.path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"torch does not answer within {timeout:g} seconds") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise OSError(lines[-1])
    try:
        # The last line: the packages may print something before.
        backend, names = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise OSError("its output cannot be read") from None
    return backend, names
