"""Mixes of tests on equal devices, for the simulator of `pytest_accel.features.planning.simulation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_accel.features.planning import simulation
from pytest_accel.hardware.shares import WHOLE
from pytest_accel.leases.policy import Request


@dataclass(frozen=True, slots=True)
class Test:
    """A test of a mix."""

    __test__ = False

    seconds: float
    devices: int = 0
    share: float = 1.0
    """The part of each of its devices that the test uses."""
    module: int = 0

    @property
    def size(self) -> float:
        """The number of devices, where a part of a device counts as a fraction."""
        return self.devices * self.share

    def requests(self, devices: Sequence[str]) -> tuple[Request, ...]:
        """Return the test's request to the pool; none if it needs no device."""
        if not self.devices:
            return ()
        parts = () if self.share == 1 else (int(self.share * WHOLE),) * len(devices)
        return (Request(0, tuple(devices), self.devices, parts=parts),)


class UniformMachine(simulation.SimulatedMachine):
    """Workers and equal devices."""

    def __init__(self, tests: Sequence[Test], devices: int, workers: int) -> None:
        self.tests = tests
        names = [f"sim-{number}" for number in range(devices)]
        jobs = [
            simulation.SimulatedTest(f"test_{test.module}.py::test_{number}", test.seconds, test.requests(names))
            for number, test in enumerate(tests)
        ]
        super().__init__(jobs, dict.fromkeys(names, WHOLE), workers)
