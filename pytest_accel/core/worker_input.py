"""The identity of a rank as a worker: what pytest-xdist gives each of its workers in `config.workerinput`.

Suites tell the main process from all others by this attribute, and name what they do not share by the worker's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_accel.core.launcher_env import RUN_OF_RANK

WorkerInput = Mapping[str, Any]
"""`config.workerinput` of one rank."""
VARIABLES = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
"""The variables that xdist sets in a worker."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def numbered(
    living: Iterable[WorkerInput], ranks: int, *, first: int = 0, run: str = "", main_argv: Sequence[str] = ()
) -> tuple[dict[str, Any], ...]:
    """Return xdist's entries for the `ranks` of a new world: the lowest numbers from `first` that no `living` rank has.

    ``workercount`` is larger than each number in use, as in a session of xdist in which no worker has crashed.
    """
    used = {int(one["workerid"][2:]) for one in living}
    end = first + len(used) + ranks
    numbers = [number for number in range(first, end) if number not in used][:ranks]
    count = max(used.union(numbers)) + 1
    return tuple(
        {"workerid": f"gw{number}", "workercount": count, "testrunuid": run, "mainargv": list(main_argv)}
        for number in numbers
    )


def is_plain(value: object) -> bool:
    """Return whether xdist could send `value` to a worker, without the channels that it can send, too."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return type(value) in _PLAIN


def environment(given: WorkerInput) -> dict[str, str | None]:
    """Return the variables that xdist sets in a worker with this input, for a rank."""
    values = (given["workerid"], str(given["workercount"]), given["testrunuid"])
    return {**dict(zip(VARIABLES, values, strict=True)), RUN_OF_RANK: given["testrunuid"]}
