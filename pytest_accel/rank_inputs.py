"""The ranks of a session as xdist's workers: their numbers, and their `workerinput`."""

from __future__ import annotations

import sys
from heapq import heappop, heappush
from uuid import uuid4

import pytest

from pytest_accel.compat.xdist_shims import worker_manager
from pytest_accel.messages.world_spec import WorkerInput


class RankInputs:
    """Numbers the ranks of a session. Owned by the pool, in the controller.

    A rank gets the lowest number that no living process of the session has. Under xdist, the numbers begin above the
    numbers of its workers, and of the workers that may replace crashed workers.
    """

    def __init__(self, config: pytest.Config) -> None:
        manager = worker_manager(config)
        given = getattr(manager, "testrunuid", None) or getattr(config.option, "testrunuid", None)
        self._run = given or uuid4().hex
        self._free: list[int] = []
        """A heap of the numbers of ranks that have ended."""
        workers = len(getattr(manager, "specs", ()))
        # xdist replaces four times as many crashed workers as there are, unless the user sets another number.
        restarts = getattr(config.option, "maxworkerrestart", None) or 4 * workers
        self._count = workers + int(restarts)
        """A number that is larger than the number of each rank so far."""

    def take(self, ranks: int) -> tuple[WorkerInput, ...]:
        """Return the `workerinput` of each rank of a new world."""
        numbers = [heappop(self._free) if self._free else self._new_number() for _ in range(ranks)]
        common = {"workercount": self._count, "testrunuid": self._run, "mainargv": list(sys.argv)}
        return tuple({"workerid": f"gw{number}", **common} for number in numbers)

    def _new_number(self) -> int:
        self._count += 1
        return self._count - 1

    def give_back(self, inputs: tuple[WorkerInput, ...]) -> None:
        """Let later ranks have the numbers of these, whose processes have ended."""
        for given in inputs:
            heappush(self._free, int(given["workerid"].removeprefix("gw")))
