"""How long ranks are waited for: pure, but for a look at whether a process is at work."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from pytest_accel.worlds.messages import When
from pytest_accel.worlds.outcome import PHASES, RankState

GRACE = 3.0
"""Seconds that the other ranks have once one has failed: they may be waiting for it for ever."""
AFTER_DEATH = 0.6
"""As `GRACE`, once one has died and none of the others is at work: nothing is to come of them, and the world ends."""
START_PATIENCE = 120.0
"""Seconds that a rank may take to import, configure pytest and join its process group."""


def beginning(when: When, ranks: Sequence[RankState], began: float) -> float:
    """When phase `when` of a test that `began` then started on the last of the `ranks`."""
    before: When | None = {"call": "setup", "teardown": "call"}.get(when)  # type: ignore[assignment]
    ends = [rank.reports[before].at for rank in ranks if before is not None and before in rank.reports]
    return max(ends, default=began)


def grace_end(ranks: Sequence[RankState], resumed: float, at_work: Callable[[], bool]) -> float:
    """When the ranks that may wait in vain have had their grace; infinite while there are none.

    A rank waits in vain for one that has ended, or that did not pass a phase which it has itself not reported.
    Teardown is every rank's own, and has the time that any phase has. Clocks were stopped until `resumed`. `at_work`
    tells whether one of those who live is computing: it is asked for only after a death.
    """
    deaths = [rank.end.at for rank in ranks if rank.end is not None]
    deaths += [rank.died_early for rank in ranks if rank.died_early is not None]
    failures = []
    wrong = [
        (PHASES.index(when), report.at)
        for rank in ranks
        for when, report in rank.reports.items()
        if report.report["outcome"] != "passed"
    ]
    for rank in ranks if wrong else ():
        open_phase = next((phase for phase in ("setup", "call") if not rank.settled(phase)), None)
        if open_phase is not None:
            failures += [at for phase, at in wrong if phase <= PHASES.index(open_phase)]
    if not deaths and not failures:
        return math.inf
    first = max(min(deaths + failures), resumed)
    if deaths and not at_work():
        return min(first + GRACE, max(min(deaths), resumed) + AFTER_DEATH)
    return first + GRACE


def is_at_work(pid: int) -> bool:
    """Whether a thread of the process runs, or waits for nothing but a processor or a disk.

    The state of a thread: proc_pid_stat(5), the third field, behind a name that may hold anything.
    """
    if sys.platform == "linux":
        return any(_state(stat) in ("R", "D") for stat in Path(f"/proc/{pid}/task").glob("*/stat"))
    else:  # noqa: RET505 - what stands after it counts as unreachable on Linux
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(pid).status() == psutil.STATUS_RUNNING)
        return False


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""  # It has ended.
