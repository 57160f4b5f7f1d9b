"""The CPU as a kind of device: each device is a set of logical CPUs that this process may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pytest_accel.core.device import Device
from pytest_accel.core.kinds import KindFacts
from pytest_accel.core.units import is_count
from pytest_accel.hardware.kernel_files import affinity, cpu_quota
from pytest_accel.hardware.vendors.base_vendor import BaseVendor

_THREADS = "OMP_NUM_THREADS"


class Cpu(BaseVendor):
    """The vendor of kind ``cpu``.

    ``cpu:N`` divides the allowed CPUs into N slots whose sizes differ by one at most; if there are fewer CPUs than
    slots, slots share CPUs. Without N, all of them are one slot.
    """

    def __init__(self, facts: KindFacts, argument: str | None = None, root: Path = Path("/")) -> None:
        """Raise ValueError unless N is a number from 1."""
        super().__init__(facts, argument, root)
        if argument is not None and not is_count(argument):
            raise ValueError(f"--accel cpu:{argument}: allowed are cpu and cpu:N, with N from 1")
        self._slots = 1 if argument is None else int(argument)

    def discover(self) -> tuple[Device, ...]:
        """Return the slots: parts of this process's CPU affinity, in total no more CPUs than the cgroup's CPU quota."""
        allowed = affinity()
        quota = cpu_quota(self._root)
        if quota is not None:
            # A quota limits CPU time, not the set of CPUs, so any CPUs of this number will do.
            allowed = allowed[: max(1, int(quota))]
        return tuple(
            Device(
                kind=self.kind,
                id=f"cpu-{index}",
                index=index,
                name="CPU",
                cores=part,
                # Ranks are pinned to the cores of a slot. For smaller parts, users ask for more slots.
                single_process=True,
            )
            for index, part in enumerate(split(allowed, self._slots))
        )

    def mask(self, devices: Sequence[Device], environ: Mapping[str, str]) -> dict[str, str | None]:
        """Set ``OMP_NUM_THREADS`` to the number of CPUs of `devices`, unless `environ` has it.

        Without it, each rank would start a thread for every CPU.
        """
        cores = {core for device in devices for core in device.cores}
        return {_THREADS: str(len(cores))} if cores and _THREADS not in environ else {}


def split(cpus: Sequence[int], slots: int) -> list[tuple[int, ...]]:
    """Divide `cpus` into `slots` contiguous parts whose lengths differ by one at most.

    If there are fewer CPUs than slots, each slot is a single CPU, in rotation.
    """
    if slots > len(cpus):
        return [(cpus[slot % len(cpus)],) for slot in range(slots)]
    cuts = [len(cpus) * slot // slots for slot in range(slots + 1)]
    return [tuple(cpus[start:end]) for start, end in pairwise(cuts)]
