"""The identities of ranks for tests of the pool."""

from __future__ import annotations

from pytest_accel.messages.world_spec import WorkerInput


def plain_worker(number: int, count: int) -> WorkerInput:
    """Return the `workerinput` of a rank, for :class:`~pytest_accel.pool.pool.Pool`."""
    return {"workerid": f"gw{number}", "workercount": count, "testrunuid": "run"}
