"""The identities of ranks for tests of the pool: numbered in each world, and without hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_accel.core.rank_exit import RankExit
from pytest_accel.core.worker_input import WorkerInput


class PlainWorkers:
    """The ranks of one world."""

    def __init__(self, ranks: int) -> None:
        self._given = tuple(
            {"workerid": f"gw{rank}", "workercount": ranks, "testrunuid": "run"} for rank in range(ranks)
        )

    def configure(self, then: Callable[[tuple[WorkerInput, ...]], None]) -> None:
        then(self._given)

    def end(self, exits: Mapping[int, RankExit], outputs: Mapping[int, dict[str, Any]]) -> None:
        pass
