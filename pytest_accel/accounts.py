"""What is said of each rank in a report, alike ranks together: pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_accel.consequences import consequence
from pytest_accel.worlds.autopsy import LOST_WITH_JOB, is_library, where
from pytest_accel.worlds.examine import Findings
from pytest_accel.worlds.outcome import RankOutcome

_WIDTH = 200
_EXPLANATION = 6
"""Lines of another rank's failure that are shown behind its first."""
_IDENTITY = re.compile(r"^(?:Current thread|Thread) (?:0x)?[0-9a-f]+ ", re.MULTILINE)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0-3``, ``ranks 0, 2, 5-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def is_consequence(outcome: RankOutcome, wrong: Sequence[RankOutcome]) -> bool:
    """Whether `outcome` only says that another rank is gone, where there is another."""
    return len(wrong) > 1 and _consequence(outcome) is not None


def alike(root: RankOutcome, outcomes: Sequence[RankOutcome]) -> list[int]:
    """The ranks to which the same has happened as to `root`."""
    return [outcome.rank for outcome in outcomes if _key(outcome) == _key(root)]


def summary(root: RankOutcome, outcomes: Sequence[RankOutcome], here: str) -> list[str]:
    """What has happened to each rank: first to `root`, last what others say who have only lost a rank."""
    same = alike(root, outcomes)
    rest = [outcome for outcome in outcomes if outcome.rank not in same]
    after = [outcome for outcome in rest if _consequence(root) is None and _consequence(outcome) is not None]
    rest = [outcome for outcome in rest if outcome not in after]
    return [f"{ranks_text(same)}: {_tell(root, here)[0]}", *others(rest, here), *_afterwards(after, here)]


def _consequence(outcome: RankOutcome) -> str | None:
    if outcome.ending == "died" and outcome.text == LOST_WITH_JOB:
        return LOST_WITH_JOB
    return None if outcome.report is None else consequence(outcome.report.exception)


def _key(outcome: RankOutcome) -> object:
    """Equal for outcomes that one text describes."""
    if outcome.report is None:
        return (outcome.ending, outcome.text, outcome.log if outcome.ending != "hung" else where(outcome.stack))
    longrepr = outcome.report.report.get("longrepr")
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else longrepr
    return (outcome.ending, tuple(sorted(crash.items())) if isinstance(crash, dict) else crash)


def others(outcomes: Sequence[RankOutcome], here: str) -> list[str]:
    """A line for each different thing that happened."""
    groups: dict[object, list[RankOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_key(outcome), []).append(outcome)
    lines = []
    for group in groups.values():
        first, *more = _tell(group[0], here)
        lines += [f"{ranks_text([outcome.rank for outcome in group])}: {first}", *(f"    {line}" for line in more)]
    return lines


def _afterwards(outcomes: Sequence[RankOutcome], here: str) -> list[str]:
    """A line for those who have lost a peer at one place: each has its own text, with addresses in it."""
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        groups.setdefault(f"{_consequence(outcome)}{_crash_place(outcome, here)}", []).append(outcome.rank)
    return [f"{ranks_text(ranks)}: failed in consequence: {said}" for said, ranks in groups.items()]


def _crash_place(outcome: RankOutcome, here: str) -> str:
    """Where the test called what failed: the last line that is no library's, else where it failed."""
    longrepr = outcome.report.report.get("longrepr") if outcome.report is not None else None
    if not isinstance(longrepr, dict) or not longrepr.get("reprcrash"):
        return ""
    entries = [entry["data"] or {} for entry in longrepr["reprtraceback"]["reprentries"]]
    places = [*(entry.get("reprfileloc") for entry in entries), longrepr["reprcrash"]]
    own = [place for place in places if place and not is_library(place["path"])] or [longrepr["reprcrash"]]
    return f" at {_from(here, own[-1]['path'])}:{own[-1]['lineno']}"


def _tell(outcome: RankOutcome, here: str) -> list[str]:
    """What happened to a rank: a line, and for a failure the first of those with which it explains itself."""
    if outcome.report is not None and outcome.ending == "failed" and wasxfail(outcome) is None:
        longrepr = outcome.report.report.get("longrepr")
        if isinstance(longrepr, dict) and longrepr.get("reprcrash"):
            crash = longrepr["reprcrash"]
            first, *more = [line for line in crash["message"].splitlines() if line.strip()] or [""]
            lines = [f"failed at {_from(here, crash['path'])}:{crash['lineno']}: {first}", *more[:_EXPLANATION]]
            return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines]
    return [_tell_briefly(outcome, here)]


def _tell_briefly(outcome: RankOutcome, here: str) -> str:
    if outcome.report is None:
        if outcome.ending == "hung":
            at = _from(here, where(outcome.stack))
            return f"{outcome.text}; ended{f' at {at}' if at else ''}"
        lines = outcome.text.strip().splitlines() or [outcome.ending]
        return lines[-1] if outcome.ending == "unstarted" else lines[0]
    longrepr = outcome.report.report.get("longrepr")
    if (expected := wasxfail(outcome)) is not None:
        return f"xfailed: {expected.removeprefix('reason: ')}" if outcome.ending == "skipped" else "passed unexpectedly"
    if outcome.ending == "skipped":
        return f"skipped: {reason(longrepr)}"
    return outcome.ending


def _from(here: str, path: str) -> str:
    """`path` as a person in the folder `here` would type it."""
    return path.removeprefix(f"{here}{os.sep}") if here else path


def reason(longrepr: Any) -> str:
    """Why a test was skipped."""
    text = str(longrepr[2]) if isinstance(longrepr, (tuple, list)) and len(longrepr) == 3 else str(longrepr)
    return text.removeprefix("Skipped: ")


def wasxfail(outcome: RankOutcome) -> str | None:
    """The reason of an expected failure that a rank's own mark has made of it."""
    return None if outcome.report is None else outcome.report.report.get("wasxfail")


def stacks(outcomes: Sequence[RankOutcome], findings: Findings) -> list[tuple[str, str]]:
    """Title and text of each different stack: of ranks that did not come to an end, and of those who saw a death."""
    own = {outcome.rank: findings.native.get(outcome.rank, outcome.stack) for outcome in outcomes if outcome.stack}
    seen = {rank: stack for rank, stack in findings.at_death.items() if rank not in own}
    return [
        (f"[{ranks_text(ranks)}] {title}" if len(outcomes) > 1 else title, found[ranks[0]])
        for title, found in (("stacks", own), ("stacks at that time", seen))
        for ranks in _together(found)
    ]


def _together(stacks: Mapping[int, str]) -> list[list[int]]:
    """The ranks whose stacks differ in nothing but the threads' identities."""
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(_IDENTITY.sub("", stack), []).append(rank)
    return list(groups.values())
