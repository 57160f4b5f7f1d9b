"""The base class of the vendors in this package."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_accel.compat import torch_api
from pytest_accel.core.device import Device, MaskError
from pytest_accel.core.kinds import KindFacts
from pytest_accel.hardware.device_order import by_figures
from pytest_accel.hardware.queries import ask_torch, lacks

_SEEN = """
import os
from pytest_accel.hardware.registry import make_vendor
answer = make_vendor({kind!r}).seen(os.environ)
"""


class BaseVendor:
    """A vendor that follows `facts`, its row of the table of kinds; see `Vendor` for the methods.

    The methods suit a kind without a mask. A subclass overrides methods that need more than the table. `argument` is
    the text after the colon of ``--accel``, for kinds that allow one. `root` is the folder that contains the kernel's
    files (``dev``, ``sys``, ``proc``).
    """

    def __init__(self, facts: KindFacts, argument: str | None = None, root: Path = Path("/")) -> None:
        self.facts = facts
        self.kind = self.facts.name
        self.mask_variables = self.facts.masks
        self.hardware = self.facts.hardware
        self.backend = self.facts.backend
        self.ranks = self.facts.ranks
        self.notes: tuple[str, ...] = ()
        self._root = root

    def lacking(self) -> str | None:
        if self.facts.build is not None:
            return lacks(*self.facts.build, self.kind)
        package = self.facts.package
        return None if package is None or importlib.util.find_spec(package) else f"{package} is not installed"

    def discover(self) -> tuple[Device, ...]:
        raise NotImplementedError

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        return tuple(devices)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        return {}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        name = self.facts.torch_type
        if self.facts.torch_index is None:
            return (name,) * len(devices)
        indices = [device.index for device in devices]
        if self.facts.torch_index == "mask":
            return tuple(f"{name}:{position}" for position in range(len(devices)))
        return tuple(f"{name}:{sorted(indices).index(index)}" for index in indices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        if not self.mask_variables and self.facts.torch_type == "cpu":
            return  # No variable hides a CPU or a named resource.
        # The order in which torch counts the devices.
        counted = sorted(devices, key=lambda device: device.index) if self.facts.torch_index == "ascending" else devices
        lacking = self.lacking() if self.facts.build is not None else None
        self.compare(counted, self.seen(environ), environ, f"; {lacking}" if lacking else "")

    def seen(self, environ: Mapping[str, str]) -> list[str]:
        """Return the devices that this process sees. This imports the kind's packages and initialises the runtime."""
        for name in (self.facts.package, *self.facts.imports):
            if name is not None:
                importlib.import_module(name)
        count = pkgutil.resolve_name(self.facts.counter or f"torch:{self.facts.torch_type}.device_count")()
        return [f"{self.facts.torch_type}:{index}" for index in range(count)]

    def ask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """Return the `devices` that a short process with `environ` sees (`seen`), in its order.

        Return no device, with a note, if the process does not answer, or does not say which devices it sees (``?``).
        """
        if not devices:
            return ()
        by_id = {device.id: device for device in devices}
        try:
            seen = ask_torch(_SEEN.format(kind=self.kind), environ)
            why = "does not say which devices it sees"
        except OSError as error:
            seen, why = ["?"], f"does not answer: {error}"
        if "?" in seen:
            self.note(f"no device is used: only torch can read {self.shown(environ)}, and it {why}")
            return ()
        return tuple(by_id[name] for name in dict.fromkeys(seen) if name in by_id)

    def note(self, text: str) -> None:
        """Add `text` to the notes, once."""
        self.notes = tuple(dict.fromkeys((*self.notes, text)))

    def shown(self, environ: Mapping[str, str]) -> str:
        """Return the variables of `environ` that concern masks, as text."""
        names = [name for name in sorted(environ) if name.startswith((*self.mask_variables, *self.facts.shown))]
        return " ".join(f"{name}={environ[name]!r}" for name in names) or "no mask"

    def compare(
        self, devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str], reason: str = ""
    ) -> None:
        """Raise MaskError, with `reason` at its end, unless a process sees (`seen`) exactly `devices`, in order.

        If each process of the kind sees all devices, `devices` only have to be among `seen`.
        """
        if self.facts.sees_all:
            same = set(self.torch_devices(devices)) <= set(seen)
        else:
            same = len(devices) == len(seen) and all(map(self.is_same, devices, seen))
        if not same:
            ids = ", ".join(device.id for device in devices)
            raise MaskError(
                f"the process should see {len(devices)} {self.kind} devices ({ids or 'none'}) "
                f"but sees {len(seen)} ({', '.join(seen) or 'none'}); environment: {self.shown(environ)}{reason}"
            )

    def is_same(self, device: Device, seen: str) -> bool:
        """Return whether `seen`, at the same position, can be `device`. torch's own names (``npu:0``) fit all."""
        return seen in ("?", device.id) or seen.startswith(f"{self.facts.torch_type}:")


def uuids_in_torch() -> list[str]:
    """Return the UUIDs of the devices that ``torch.cuda`` counts; ``?`` for a device whose UUID torch does not know."""
    import torch

    count = torch.cuda.device_count()
    return [str(torch_api.device_uuid(torch.cuda.get_device_properties(index)) or "?") for index in range(count)]
