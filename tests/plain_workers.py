"""The identities of ranks for tests of the pool: numbered in each world."""

from __future__ import annotations

from pytest_accel.messages.world_spec import WorkerInput


class PlainWorkers:
    """A `RankNumbers`."""

    def take(self, ranks: int) -> tuple[WorkerInput, ...]:
        return tuple({"workerid": f"gw{rank}", "workercount": ranks, "testrunuid": "run"} for rank in range(ranks))

    def give_back(self, inputs: tuple[WorkerInput, ...]) -> None:
        pass
