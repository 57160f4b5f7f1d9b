"""How long ranks are waited for: pure, but for a look at whether a process is at work."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from pytest_accel.core.messages import When
from pytest_accel.core.timeouts import AFTER_DEATH, GRACE
from pytest_accel.diagnostics.rank_state import PHASES, RankState


def beginning(when: When, ranks: Sequence[RankState], began: float) -> float:
    """Return when phase `when` of a test that `began` then started on the last of the `ranks`."""
    before = PHASES[: PHASES.index(when)]
    return max((rank.reports[phase].at for rank in ranks for phase in before if phase in rank.reports), default=began)


class Grace(NamedTuple):
    """The time that the other ranks have once one has failed or ended."""

    end: float = math.inf
    """When it is over (`clock.monotonic`); infinite while no rank waits in vain."""
    seconds: float = 0.0
    cause: str = ""
    """The event that it counts from: ``rank 1 failed``."""


_ENDED = {"died": "died", "hung": "timed out", "unstarted": "could not run the test", "failed": "failed"}
_REPORTED = {"failed": "failed", "skipped": "skipped"}


def grace(ranks: Sequence[RankState], resumed: float, at_work: Callable[[], bool]) -> Grace:
    """Return the grace of the ranks that may wait in vain.

    A rank waits in vain for one that has ended, or that did not pass a phase which it has itself not reported. In its
    teardown it waits for one that has failed and come to the end of the test; a teardown that is at work has the time
    that any phase has. Clocks were stopped until `resumed`. `at_work` tells whether one of those who live is computing:
    it is asked for only after a death, or a failure.
    """
    deaths = [(rank.end.at, f"rank {rank.rank} {_ENDED[rank.end.ending]}") for rank in ranks if rank.end is not None]
    deaths += [(rank.died_early, f"rank {rank.rank} died") for rank in ranks if rank.died_early is not None]
    failures = []
    wrong = [
        (PHASES.index(when), (report.at, f"rank {rank.rank} {_REPORTED.get(report.report['outcome'], 'ended')}"))
        for rank in ranks
        for when, report in rank.reports.items()
        if report.report["outcome"] != "passed"
    ]
    in_teardown = False
    for rank in ranks if wrong else ():
        open_phase = next((phase for phase in PHASES if not rank.settled(phase)), None)
        if open_phase == "teardown":
            in_teardown = True
        elif open_phase is not None:
            failures += [cause for phase, cause in wrong if phase <= PHASES.index(open_phase)]
    if in_teardown and not failures:
        gone = [
            (rank.reports["teardown"].at, f"rank {rank.rank} failed")
            for rank in ranks
            if rank.finished is not None
            and "teardown" in rank.reports
            and any(report.report["outcome"] == "failed" for report in rank.reports.values())
        ]
        if gone and not at_work():
            failures.append(min(gone))
    if not deaths and not failures:
        return Grace()
    at, cause = min(deaths + failures)
    graces = [Grace(max(at, resumed) + GRACE, GRACE, cause)]
    if deaths and not at_work():
        at, cause = min(deaths)
        graces.append(Grace(max(at, resumed) + AFTER_DEATH, AFTER_DEATH, cause))
    return min(graces)


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
