"""Whatever accelerator a package adds to torch that none of the other kinds knows (torch's ``PrivateUse1``).

Such a package announces itself as an entry point of the group ``torch.backends``, which torch calls when it is imported
(torch ``__init__.py``, ``_import_device_backends``). What it then has, `torch.accelerator` tells, but only a process
that has imported torch and all that comes with it; so one that is thrown away is asked. Nothing is known of a variable
that hides such a device: every process sees all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import kinds
from pytest_accel.hardware.order import by_figures
from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import mismatch

_GROUP = "torch.backends"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_OF_OTHER_KINDS = {
    "habana_frameworks",
    "intel_extension_for_pytorch",
    "torch_mlu",
    "torch_musa",
    "torch_neuronx",
    "torch_npu",
    "torch_xla",
}
_TIMEOUT = 60.0
_ASK = """
import json
import torch

found = torch.accelerator.current_accelerator()
names = []
if found is not None:
    module = torch.get_device_module(found.type)
    for index in range(torch.accelerator.device_count()):
        try:
            names.append(str(module.get_device_name(index)))
        except Exception:
            names.append(found.type)
print()
print(json.dumps([None if found is None else found.type, names]))
"""


class PrivateUse1:
    """The vendor of kind ``privateuse1``; a device's id is the backend's name for torch, a dash and its index.

    `always`: ask also where no package announces a backend that other kinds do not know.
    """

    kind = "privateuse1"
    mask_variables: tuple[str, ...] = ()
    hardware = True
    backend: str | None = None
    ranks = True

    def __init__(self, always: bool = False) -> None:
        self.notes: tuple[str, ...] = ()
        self._always = always
        self._found: tuple[Device, ...] | None = None

    def lacking(self) -> str | None:
        """Nothing: torch itself has told of the devices."""
        return None

    def discover(self) -> tuple[Device, ...]:
        """What torch has in a process of its own, asked once; a backend that another kind knows does not count.

        Loading torch takes a second or more, so nobody is asked where no unknown backend is installed.
        """
        if self._found is None:
            names = unknown_backends()
            self._found = self._ask(", ".join(names)) if names or self._always else ()
        return self._found

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """All: no mask is known."""
        return tuple(devices)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """As torch counts them."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Nothing: each process sees all devices, and uses those that are its own by their names."""
        return {}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """``NAME:INDEX`` by the device's own index, since every process counts all."""
        return tuple(f"{_backend(device)}:{device.index}" for device in devices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """MaskError unless torch has this backend, and as many of its devices as each index needs."""
        import torch

        found = torch.accelerator.current_accelerator()
        check(devices, None if found is None else found.type, torch.accelerator.device_count(), environ)

    def _ask(self, names: str) -> tuple[Device, ...]:
        try:
            backend, found = ask_torch()
        except OSError as error:
            self.notes = (f"what torch's backends ({names}) have is not known: {error}",)
            return ()
        if backend is None or backend in kinds() or not found:
            has = "no accelerator" if backend is None or not found else f"{backend}, which is a kind of its own"
            self.notes = (f"torch, with the backends ({names}), has {has}",) if names else ()
            return ()
        # Whether two processes can use one is not known.
        return tuple(
            Device(kind=self.kind, id=f"{backend}-{index}", index=index, name=name, single_process=True)
            for index, name in enumerate(found)
        )


def make(argument: str | None) -> PrivateUse1:
    """For ``--accel privateuse1``."""
    takes_none("privateuse1", argument)
    return PrivateUse1()


def unknown_backends() -> tuple[str, ...]:
    """The names of the installed entry points of ``torch.backends``, but for those that belong to other kinds."""
    points = entry_points(group=_GROUP)
    return tuple(sorted({point.name for point in points if point.module.partition(".")[0] not in _OF_OTHER_KINDS}))


def ask_torch(timeout: float = _TIMEOUT) -> tuple[str | None, list[str]]:
    """The type of torch's accelerator and the names of its devices, from a process of their own.

    OSError, with what it said last, where it fails, or does not answer within `timeout` seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"torch does not answer within {timeout:g} seconds") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise OSError(said[-1])
    try:
        # What the packages themselves print comes before.
        backend, names = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise OSError("its answer cannot be read") from None
    return backend, names


def check(devices: Sequence[Device], backend: str | None, count: int, environ: Mapping[str, str]) -> None:
    """MaskError, with both and the environment, unless torch has each of `devices`."""
    seen = [f"{backend}:{index}" for index in range(count)] if backend is not None else []
    if any(f"{_backend(device)}:{device.index}" not in seen for device in devices):
        raise mismatch("privateuse1", devices, seen, environ, (_AUTOLOAD,))


def _backend(device: Device) -> str:
    return device.id.rpartition("-")[0]
