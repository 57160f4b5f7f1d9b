"""Mixes of tests on devices that are all alike, for the simulator of `pytest_accel.schedule.simulation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request
from pytest_accel.schedule import simulation


@dataclass(frozen=True, slots=True)
class Test:
    """A test of a mix."""

    __test__ = False

    seconds: float
    devices: int = 0
    share: float = 1.0
    """The part of each of its devices that it takes."""
    module: int = 0

    @property
    def size(self) -> float:
        """Devices, parts counted as such."""
        return self.devices * self.share

    def request(self, devices: Sequence[str]) -> Request | None:
        """What it asks the pool for."""
        if not self.devices:
            return None
        parts = () if self.share == 1 else (int(self.share * WHOLE),) * len(devices)
        return Request(0, tuple(devices), self.devices, parts=parts)


class UniformMachine(simulation.SimulatedMachine):
    """Workers, and devices that are all alike."""

    def __init__(self, tests: Sequence[Test], devices: int, workers: int) -> None:
        self.tests = tests
        names = [f"sim-{number}" for number in range(devices)]
        jobs = [
            simulation.Job(f"test_{test.module}.py::test_{number}", test.seconds, test.request(names))
            for number, test in enumerate(tests)
        ]
        super().__init__(jobs, dict.fromkeys(names, WHOLE), workers)
