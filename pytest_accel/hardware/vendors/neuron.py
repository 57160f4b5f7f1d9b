"""NeuronCores of AWS Trainium and Inferentia, used through ``torch_neuronx`` (torch_xla). Not confirmed on one.

A device is one NeuronCore as the runtime counts them: a card is ``/dev/neuronN``, its ``core_count`` is in sysfs
(Neuron Sysfs User Guide; driver 2.31 moved parts of that tree, so the cores' folders are counted where it is gone), and
cards are counted in order (in a container those that it has). On Trainium2 two cores are one by default, else as
``NEURON_LOGICAL_NC_CONFIG`` says (Logical NeuronCore configuration); that Trainium3 does the same is unverified.

``NEURON_RT_VISIBLE_CORES`` is a number or a range, ``NEURON_RT_NUM_CORES`` how many the runtime may choose, 0 being all
(Neuron Runtime configuration); Ray and others also write lists with commas. What an empty or wrong list does, and that
torch numbers the cores ascending, is unverified. A core belongs to one process at a time, so ranks need
``visible="rank"``.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from itertools import count, groupby
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.hardware.order import by_figures
from pytest_accel.hardware.registry import takes_none
from pytest_accel.hardware.vendors.device_nodes import (
    by_place,
    compare,
    names_in_xla,
    nodes,
    not_installed,
    numbers,
    pick,
    read_number,
    read_text,
)

_CORES, _COUNT, _RUNTIME = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "PJRT_DEVICE"
_TOGETHER = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
_PAIRED = ("Trainium2", "Trainium3")
_NODES = re.compile(r"neuron([0-9]+)", re.ASCII)
_ENTRY = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_COUNTS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*", re.ASCII)


class Neuron:
    """The vendor of kind ``neuron``; a device's index is the runtime's number of the core.

    `root` is where ``dev`` and ``sys`` are found, `environ` what says how many cores are one (None: this process has).
    """

    kind = "neuron"
    mask_variables: tuple[str, ...] = (_RUNTIME, _CORES, _COUNT)
    hardware = True
    backend: str | None = "xla"
    ranks = True

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> None:
        self.notes: tuple[str, ...] = ()
        self._root = root
        given = os.environ if environ is None else environ
        self._together = next((given[name] for name in _TOGETHER if name in given), "")

    def lacking(self) -> str | None:
        """torch_neuronx."""
        return not_installed("torch_neuronx")

    def discover(self) -> tuple[Device, ...]:
        """Every core, in the runtime's order; its id is its card's number and, after a dot, its place on the card."""
        devices: list[Device] = []
        notes: list[str] = []
        for card, name in sorted(nodes(self._root / "dev", _NODES).items()):
            folder = self._root / "sys/devices/virtual/neuron_device" / name
            cores = read_number(folder / "core_count") or len(list(folder.glob("neuron_core[0-9]*")))
            if not cores:
                notes.append(f"{name} is left out: sysfs does not tell how many cores it has")
            model = read_text(folder / "info/architecture/device_name")
            for first in range(0, cores, self._fused(model)):
                devices.append(
                    Device(
                        kind=self.kind,
                        id=f"{self.kind}-{card}.{first}",
                        index=len(devices),
                        name=f"AWS {model or 'NeuronCore'}",
                        single_process=True,
                    )
                )
        self.notes = tuple(notes)
        return tuple(devices)

    def visible(self, devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
        """The cores that are listed, else the first so many; none where torch_xla is told to run on something else.

        Which cores the runtime would choose is not known before it does; the first stand for them.
        """
        if environ.get(_RUNTIME, "NEURON") != "NEURON":
            return ()
        if _CORES in environ:
            return pick(read_cores(environ[_CORES], 1 + max(numbers(devices), default=-1)), devices)
        text = environ.get(_COUNT, "")
        granted = sum(map(int, text.split(","))) if _COUNTS.fullmatch(text) else 0
        return tuple(devices[:granted]) if granted else tuple(devices)

    def fastest(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """As they are in the machine: the cores of one are alike."""
        return by_figures(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """The cores, ascending, neighbours as a range.

        For none the list is empty, and torch_xla is told to run on the CPU, in case that an empty list hides nothing.
        """
        runtime = "NEURON" if devices else "CPU"
        return {_RUNTIME: runtime, _CORES: write_cores(numbers(devices)), _COUNT: None}

    def torch_devices(self, devices: Sequence[Device]) -> tuple[str, ...]:
        """``xla:N``, where N is the core's place by number."""
        return by_place("xla", devices)

    def verify(self, devices: Sequence[Device], environ: Mapping[str, str]) -> None:
        """MaskError unless torch_xla counts as many; nothing tells which they are."""
        importlib.import_module("torch_neuronx")
        compare(self.kind, devices, names_in_xla(), environ, (*self.mask_variables, *_TOGETHER))

    def _fused(self, model: str) -> int:
        if self._together in ("1", "2"):
            return int(self._together)
        return 2 if model in _PAIRED else 1


def make(argument: str | None) -> Neuron:
    """For ``--accel neuron``."""
    takes_none("neuron", argument)
    return Neuron()


def read_cores(text: str, there: int) -> list[int]:
    """The cores of ``NEURON_RT_VISIBLE_CORES=text``, of which `there` are: ``0-3``, ``5``, ``0,2-3``.

    What is no number or ascending range, or is beyond the last core, ends the list; a repetition counts once.
    """
    found: dict[int, None] = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            break
        first, last = int(match[1]), int(match[2] or match[1])
        found |= dict.fromkeys(range(first, min(last + 1, there)))
        if last < first or last >= there:
            break
    return list(found)


def write_cores(ascending: Sequence[int]) -> str:
    """``0-3`` for neighbours, ``5`` for one alone, with commas between them."""
    steps = count()
    runs = [list(run) for _, run in groupby(ascending, lambda number: number - next(steps))]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
