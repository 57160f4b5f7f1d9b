"""NeuronCores of AWS Trainium and Inferentia, used through ``torch_neuronx`` (torch_xla). Not tested on one.

A device is one NeuronCore as the runtime counts them. A card is ``/dev/neuronN``, and its ``core_count`` is in sysfs
(Neuron Sysfs User Guide; driver 2.31 moved parts of that tree, so the cores' folders are counted if the file is
missing). Cards are counted in order (in a container, those that it has). On Trainium2 the runtime combines two cores
into one by default; ``NEURON_LOGICAL_NC_CONFIG`` changes that (Logical NeuronCore configuration). That Trainium3 does
the same is unverified.

``NEURON_RT_VISIBLE_CORES`` is a number or a range, ``NEURON_RT_NUM_CORES`` the number of cores that the runtime may
choose, 0 meaning all (Neuron Runtime configuration); Ray and others also write lists with commas. Unverified: the
effect of an empty or invalid list, and that torch numbers the cores in ascending order. A core belongs to one process
at a time, so ranks need ``visible="rank"``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import count, groupby
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KINDS
from pytest_accel.hardware.masks import numbers, pick_numbers
from pytest_accel.hardware.sysfs import nodes, read_number, read_text
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_RUNTIME, _CORES, _COUNT = KINDS["neuron"].masks
_CORES_PER_DEVICE = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
_TWO_CORES = ("Trainium2", "Trainium3")
_ENTRY = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_COUNTS = re.compile(r"[0-9]{1,9}(,[0-9]{1,9})*", re.ASCII)


class Neuron(BaseVendor):
    """The vendor of kind ``neuron``; a device's index is the runtime's number of the core.

    `environ` (None: that of this process) may set the number of cores that are combined into one.
    """

    facts = KINDS["neuron"]

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> None:
        super().__init__(root)
        given = os.environ if environ is None else environ
        self._cores_per_device = next((given[name] for name in _CORES_PER_DEVICE if name in given), "")

    def discover(self) -> tuple[Device, ...]:
        """Return every core, in the runtime's order; its id has the number of its card and its position on the card."""
        devices: list[Device] = []
        notes: list[str] = []
        for card, name in sorted(nodes(self._root / "dev", "neuron([0-9]+)").items()):
            folder = self._root / "sys/devices/virtual/neuron_device" / name
            cores = read_number(folder / "core_count") or len(list(folder.glob("neuron_core[0-9]*")))
            if not cores:
                notes.append(f"{name} is left out: sysfs does not have its number of cores")
            model = read_text(folder / "info/architecture/device_name")
            for first in range(0, cores, self._device_size(model)):
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
        """Return the listed cores, else the first ones up to the number that is set.

        No core is left if the environment tells torch_xla to run on another device. Which cores the runtime would
        choose is not known beforehand, so the first ones are assumed.
        """
        if environ.get(_RUNTIME, "NEURON") != "NEURON":
            return ()
        if _CORES in environ:
            return pick_numbers(read_cores(environ[_CORES], 1 + max(numbers(devices), default=-1)), devices)
        text = environ.get(_COUNT, "")
        granted = sum(map(int, text.split(","))) if _COUNTS.fullmatch(text) else 0
        return tuple(devices[:granted]) if granted else tuple(devices)

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Return a mask with the cores, ascending, neighbours as a range.

        Without cores the list is empty. In case an empty list hides nothing, the mask makes torch_xla run on the CPU.
        """
        runtime = "NEURON" if devices else "CPU"
        return {_RUNTIME: runtime, _CORES: write_cores(numbers(devices)), _COUNT: None}

    def _device_size(self, model: str) -> int:
        if self._cores_per_device in ("1", "2"):
            return int(self._cores_per_device)
        return 2 if model in _TWO_CORES else 1


make = Neuron.make


def read_cores(text: str, total: int) -> list[int]:
    """Return the cores of ``NEURON_RT_VISIBLE_CORES=text`` (``0-3``, ``5``, ``0,2-3``) on a machine with `total` cores.

    An entry that is not a number or ascending range, or exceeds the last core, ends the list; a repetition counts once.
    """
    found: dict[int, None] = {}
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            break
        first, last = int(match[1]), int(match[2] or match[1])
        found |= dict.fromkeys(range(first, min(last + 1, total)))
        if last < first or last >= total:
            break
    return list(found)


def write_cores(ascending: Sequence[int]) -> str:
    """Return a list with commas: ``0-3`` for neighbours, ``5`` for a single core."""
    steps = count()
    runs = [list(run) for _, run in groupby(ascending, lambda number: number - next(steps))]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
