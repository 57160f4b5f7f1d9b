"""The identity of a rank as a worker, in the form of the data that pytest-xdist's workers have: `config.workerinput`.

By this attribute suites tell the main process from others. With the worker's id they name things that are not shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_accel.core.launcher_env import RUN_OF_RANK

WorkerInput = Mapping[str, Any]
"""`config.workerinput` of one rank."""
VARIABLES = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
"""The variables that xdist sets in a worker."""


def environment(given: WorkerInput) -> dict[str, str | None]:
    """Return the variables that xdist sets in a worker with this input, for a rank."""
    values = (given["workerid"], str(given["workercount"]), given["testrunuid"])
    return {**dict(zip(VARIABLES, values, strict=True)), RUN_OF_RANK: given["testrunuid"]}
