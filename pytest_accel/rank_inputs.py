"""The ranks of a session as xdist's workers: their `workerinput`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from uuid import uuid4

import pytest

from pytest_accel.compat.xdist_shims import worker_manager
from pytest_accel.messages.world_spec import WorkerInput


def worker_inputs(config: pytest.Config) -> Callable[[int, int], WorkerInput]:
    """Return a function that returns the `workerinput` of a rank: the argument `worker` of the pool.

    Under xdist, the numbers begin above those of its workers, and of the workers that may replace crashed workers.
    """
    manager = worker_manager(config)
    given = getattr(manager, "testrunuid", None) or getattr(config.option, "testrunuid", None)
    common = {"testrunuid": given or uuid4().hex, "mainargv": list(sys.argv)}
    workers = len(getattr(manager, "specs", ()))
    # xdist replaces four times as many crashed workers as there are, unless the user sets another number.
    restarts = getattr(config.option, "maxworkerrestart", None) or 4 * workers
    first = workers + int(restarts)
    return lambda number, count: {"workerid": f"gw{first + number}", "workercount": first + count, **common}
