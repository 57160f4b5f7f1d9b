"""The identity of a rank as a worker: what pytest-xdist gives each of its workers in `config.workerinput`.

Suites tell the main process from all others by this attribute, and name what they do not share by the worker's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_accel.core.launcher_env import RUN_OF_RANK

WorkerInput = Mapping[str, Any]
"""`config.workerinput` of one rank."""
VARIABLES = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
"""The variables that xdist sets in a worker."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class RankInput(dict[str, Any]):
    """`config.workerinput` in a rank. The error for a missing entry says which hook has not added it."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"{name} is missing in workerinput of this rank: the main process has no pytest_configure_node that adds "
            "it; implement or register this hook without -n, too"
        )


def only_plain(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `entries` that xdist could send to a worker or back, without channels, which it can send, too."""
    return {name: value for name, value in dict(entries).items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return type(value) in _PLAIN


def environment(given: WorkerInput) -> dict[str, str | None]:
    """Return the variables that xdist sets in a worker with this input, for a rank."""
    values = (given["workerid"], str(given["workercount"]), given["testrunuid"])
    return {**dict(zip(VARIABLES, values, strict=True)), RUN_OF_RANK: given["testrunuid"]}
