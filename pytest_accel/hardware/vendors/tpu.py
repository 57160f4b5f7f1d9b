"""Google's TPU chips, used through ``torch_xla``. Not confirmed on a TPU.

Chips are PCI devices of Google's (ids from JAX's ``hardware_utils.py`` and torch_xla's ``_internal/tpu.py``) with a
node: ``/dev/accelN`` of Google's own driver, or ``/dev/vfio/GROUP``. ``/dev/accel``, a folder, is other makers'.

``TPU_VISIBLE_CHIPS`` alone is not enough: libtpu also wants the shape in which the chips lie. It has two names, for one
is what older releases read: ``TPU_CHIPS_PER_PROCESS_BOUNDS`` with ``TPU_PROCESS_BOUNDS`` (torch_xla presets these for
one chip where they are not set) and ``TPU_CHIPS_PER_HOST_BOUNDS`` with ``TPU_HOST_BOUNDS`` (what Ray sets; jax issue
14977). ``TPU_VISIBLE_DEVICES`` is the old name of the mask, which counts where the new one is not set or empty. Which
chip a number is (here: its place in PCI order), and that torch numbers them ascending, is unverified. One process at a
time can have a chip, so ranks need ``visible="rank"``; chips that are masked apart do not form a mesh.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.hardware.order import by_figures
from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import (
    compare,
    names_in_xla,
    nodes,
    not_installed,
    numa_node,
    numbers,
    pick,
    read_number,
    read_numbers,
)

_CHIPS, _OLD = "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"
_SHAPES = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS")
_PROCESSES = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
_RUNTIME = "PJRT_DEVICE"
_GOOGLE = 0x1AE0
_NAMES = {
    0x27: "TPU v2 or v3",
    0x56: "TPU v4 lite",
    0x5E: "TPU v4",
    0x62: "TPU v5p",
    0x63: "TPU v5e",
    0x6F: "TPU v6e",
    0x76: "TPU 7x",
}
# Up to v3 a chip's two cores are two devices of torch_xla's; later they are one (num_logical_cores_per_chip).
_TWO_CORES = _NAMES[0x27]
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
_ACCEL = re.compile(r"accel([0-9]+)", re.ASCII)
_VFIO = re.compile(r"([0-9]+)", re.ASCII)


class Tpu:
    """The vendor of kind ``tpu``; a device's index is its chip's number. `root` is where ``dev`` and ``sys`` are."""

    kind = "tpu"
    mask_variables: tuple[str, ...] = (_RUNTIME, _CHIPS, _OLD)
    hardware = True
    backend: str | None = "xla"
    ranks = True

    def __init__(self, root: Path = Path("/")) -> None:
        self.notes: tuple[str, ...] = ()
        self._root = root

    def lacking(self) -> str | None:
        """torch_xla."""
        return not_installed("torch_xla")

    def discover(self) -> tuple[Device, ...]:
        """Every chip whose node is there, in PCI order."""
        accel, groups = nodes(self._root / "dev", _ACCEL), nodes(self._root / "dev/vfio", _VFIO)
        if not accel and not groups:
            return ()
        every = sorted((self._root / "sys/bus/pci/devices").glob("*"))
        chips = {place: model for place in every if (model := self._model(place)) in _NAMES}
        if accel and len(accel) != len(chips):
            # Nothing says which of the chips are those that this container has.
            names = {_NAMES[model] for model in chips.values()}
            name = names.pop() if len(names) == 1 else "TPU"
            return tuple(
                Device(kind=self.kind, id=f"{self.kind}-{number}", index=index, name=name, single_process=True)
                for index, number in enumerate(sorted(accel) if chips else ())
            )
        there = [place for place in chips if accel or (place / "iommu_group").resolve().name in groups.values()]
        return tuple(
            Device(
                kind=self.kind,
                id=place.name,
                index=index,
                name=_NAMES[chips[place]],
                pci=place.name,
                numa=numa_node(self._root, place.name),
                single_process=True,
            )
            for index, place in enumerate(there)
        )

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """What the list of chips leaves; none where torch_xla is told to run on something else."""
        if environ.get(_RUNTIME, "TPU") != "TPU":
            return ()
        text = environ.get(_CHIPS) or environ.get(_OLD)
        return pick(read_numbers(text), devices) if text else tuple(devices)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """As they are in the machine: the chips of one are alike."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """The chips, ascending, and their shape where there are 1, 2 or 4; for other numbers libtpu is left to find it.

        All chips of the machine need neither; what shape is inherited with them stays. No list hides every chip (an
        empty one is none), but torch_xla does not touch them where it is told to run on the CPU.
        """
        if not devices:
            return {_RUNTIME: "CPU"}
        every = self.discover()
        whole = set(every) == set(devices)
        if whole and len(self.visible(every, {**environ, _RUNTIME: "TPU"})) == len(every):
            return {_RUNTIME: "TPU"}
        chips = None if whole else ",".join(map(str, numbers(devices)))
        shape = None if whole else _BOUNDS.get(len(devices))
        changes: dict[str, str | None] = {_RUNTIME: "TPU", _CHIPS: chips, _OLD: chips}
        changes |= dict.fromkeys(_SHAPES, shape)
        return changes | dict.fromkeys(_PROCESSES, None if shape is None else "1,1,1")

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """``xla:N``: the chips in ascending order; of a chip with two cores the first."""
        ascending = sorted(devices, key=lambda device: device.index)
        first = {device: sum(map(_cores, ascending[:place])) for place, device in enumerate(ascending)}
        return tuple(f"xla:{first[device]}" for device in devices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """MaskError unless torch_xla counts as many; nothing tells which they are."""
        check(devices, names_in_xla(), environ)

    def _model(self, place: Path) -> int | None:
        """The PCI device id of what is Google's."""
        return read_number(place / "device") if read_number(place / "vendor") == _GOOGLE else None


def make(argument: str | None) -> Tpu:
    """For ``--accel tpu``."""
    takes_none("tpu", argument)
    return Tpu()


def check(devices: Sequence[Device], seen: Sequence[str], environ: Mapping[str, str]) -> None:
    """MaskError, with both and the environment, unless `seen` are as many as the cores of `devices`."""
    each = [device for device in devices for _ in range(_cores(device))]
    compare("tpu", each, seen, environ, (_RUNTIME, _CHIPS, _OLD, *_SHAPES, *_PROCESSES))


def _cores(device: Device) -> int:
    return 2 if device.name == _TWO_CORES else 1
