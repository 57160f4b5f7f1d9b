"""What is said of each rank in a report, alike ranks together: pure."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_accel.core.frames import PACKAGE, is_library
from pytest_accel.core.messages import ExceptionSketch, When
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.diagnostics.diagnosis import Findings, Interrupted
from pytest_accel.diagnostics.exit_status import LOST_WITH_JOB, where
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.verdict.secondary_failures import consequence

_WIDTH = 200
SILENT = "; does not respond to signals"
_EXPLANATION = 6
"""Lines of another rank's failure that are shown behind its first."""
_IDENTITY = re.compile(r"^(?:Current thread|Thread) (?:0x)?[0-9a-f]+ ", re.MULTILINE)


def is_consequence(outcome: RankOutcome, wrong: Sequence[RankOutcome]) -> bool:
    """Whether `outcome` only says that another rank is gone, where there is another."""
    return len(wrong) > 1 and _consequence(outcome) is not None


def alike(root: RankOutcome, outcomes: Sequence[RankOutcome]) -> list[int]:
    """The ranks to which the same has happened as to `root`."""
    return [outcome.rank for outcome in outcomes if _key(outcome) == _key(root) or _repeats(outcome, root)]


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


def _repeats(outcome: RankOutcome, root: RankOutcome) -> bool:
    """Return whether the rank of `outcome` has failed in the same example as `root`, in the same way."""
    error = None if outcome.report is None else outcome.report.exception
    return error is not None and error.own and error.peer == root.rank


def _key(outcome: RankOutcome) -> object:
    """Equal for outcomes that one text describes."""
    if outcome.report is None:
        return (outcome.ending, outcome.text, outcome.log if outcome.ending != "hung" else where(outcome.stack))
    longrepr = outcome.report.report.get("longrepr")
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else longrepr
    later = _key(outcome.later) if outcome.later is not None else None
    return (outcome.ending, tuple(sorted(crash.items())) if isinstance(crash, dict) else crash, later)


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
    first, *more = _tell_report(outcome, here)
    if outcome.later is not None:
        first += f"; {_tell_end(outcome.later, here)}"
    return [first, *more]


def _tell_report(outcome: RankOutcome, here: str) -> list[str]:
    if outcome.report is not None and outcome.ending == "failed" and wasxfail(outcome) is None:
        longrepr = outcome.report.report.get("longrepr")
        if isinstance(longrepr, dict) and longrepr.get("reprcrash"):
            crash = longrepr["reprcrash"]
            first, *more = [line for line in crash["message"].splitlines() if line.strip()] or [""]
            place = f" at {_from(here, crash['path'])}:{crash['lineno']}"
            # The message of a fixture of this package names what is missing: its own line says nothing.
            place = "" if crash["path"].startswith(PACKAGE) else place
            lines = [f"failed{place}: {first}", *more[:_EXPLANATION]]
            return [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines]
        if said := headline(outcome.report.exception):
            return [f"failed: {said}"]
    return [_tell_briefly(outcome, here)]


def headline(error: ExceptionSketch | None) -> str:
    """Return type and first line of an exception, as a traceback's last line has them; nothing if there is none."""
    if error is None:
        return ""
    name, first = error.qualname.rpartition(".")[2], next(iter(error.text.splitlines()), "")
    line = f"{name}: {first}" if first else name
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"


def _tell_briefly(outcome: RankOutcome, here: str) -> str:
    if outcome.report is None:
        if outcome.ending == "hung" and not outcome.secondary:
            return f"timed out{_place(outcome, here)}"
        if outcome.ending == "hung":
            return _tell_end(outcome, here)
        lines = outcome.text.strip().splitlines() or [outcome.ending]
        return lines[-1] if outcome.ending == "unstarted" else lines[0]
    longrepr = outcome.report.report.get("longrepr")
    if (expected := wasxfail(outcome)) is not None:
        return f"xfailed: {expected.removeprefix('reason: ')}" if outcome.ending == "skipped" else "passed unexpectedly"
    if outcome.ending == "skipped":
        return f"skipped: {reason(longrepr)}"
    return outcome.ending


def _tell_end(outcome: RankOutcome, here: str) -> str:
    """Return how a rank ended in a later phase than the one that is judged, or because of another rank."""
    if outcome.ending == "hung":
        return f"{outcome.text}{_place(outcome, here)}"
    return f"{outcome.ending}: {_tell_briefly(outcome, here)}"


def _place(outcome: RankOutcome, here: str) -> str:
    if not outcome.stack:
        return SILENT
    at = _from(here, where(outcome.stack))
    return f"; was at {at}" if at else ""


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
    """Return title and text of each different stack: of ranks that were terminated, and of those who saw a death."""
    ends = [outcome.later or outcome for outcome in outcomes]
    own = {end.rank: findings.native.get(end.rank, end.stack) for end in ends if end.stack}
    seen = {rank: stack for rank, stack in findings.at_death.items() if rank not in own}
    return [
        (f"[{ranks_text(ranks)}] {title}" if len(outcomes) > 1 else title, found[ranks[0]])
        for title, found in (("stacks", own), ("stacks at that time", seen))
        for ranks in _together(found)
    ]


def interrupted_lines(world: Interrupted, here: str) -> list[str]:
    """Return the lines about a test that ran when the session was interrupted."""
    said: dict[str, list[int]] = {}
    for rank in sorted({**world.ends, **world.stacks}):
        stack = world.stacks.get(rank, "")
        at = f"at {_from(here, where(stack))}" if where(stack) else "in no code of the test"
        text = world.ends.get(rank) or (at if stack else SILENT.removeprefix("; "))
        said.setdefault(text, []).append(rank)
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in said.items()]
    lines += [shorten_paths(line, here) for line in world.findings.collectives]
    for ranks in _together({rank: stack for rank, stack in world.stacks.items() if stack}):
        lines += [f"--- [{ranks_text(ranks)}] stacks ---", world.stacks[ranks[0]]]
    return lines


def progress(
    test: str, when: When, seconds: float, timeout: float, places: Mapping[int, str], collectives: list[str], here: str
) -> str:
    """Return the line about a `test` that has been in one phase for many `seconds`; `places` is where ranks are."""
    said: dict[str, list[int]] = {}
    for rank, place in places.items():
        said.setdefault(_from(here, place), []).append(rank)
    parts = [f"{ranks_text(ranks)} at {place}" for place, ranks in said.items()]
    known = "; ".join([*parts, *(shorten_paths(line, here) for line in collectives)])
    text = f"accel: {test} has been in its {when} phase for {seconds:.0f} s (timeout: {timeout:g} s)"
    return f"{text}: {known}" if known else text


def shorten_paths(text: str, here: str) -> str:
    """Return `text` with its places as a person in the folder `here` would type them."""
    return text.replace(f" at {here}{os.sep}", " at ") if here else text


def _together(stacks: Mapping[int, str]) -> list[list[int]]:
    """The ranks whose stacks differ in nothing but the threads' identities."""
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(_IDENTITY.sub("", stack), []).append(rank)
    return list(groups.values())
