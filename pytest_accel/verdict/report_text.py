"""Text about each rank in a report; ranks with the same outcome share a line. Pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from pytest_accel.core.frames import PACKAGE, is_library
from pytest_accel.core.rank_messages import ExceptionSketch, When
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.skip_text import reason_of_skip
from pytest_accel.core.truncation import cut_end, cut_gloo
from pytest_accel.diagnostics.diagnosis import Findings, Interrupted
from pytest_accel.diagnostics.python_stacks import where
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.verdict.secondary_failures import consequence

_WIDTH = 200
"""Characters of a line. Longer lines are truncated."""
SILENT = "; does not respond to signals"
"""Appended for a rank whose stacks could not be taken."""
_MORE_LINES = 6
"""Lines of a rank's failure message that are shown after the first."""
_THREAD_ID = re.compile(r"^(?:Current thread|Thread) (?:0x)?[0-9a-f]+ ", re.MULTILINE)


def alike(root: RankOutcome, outcomes: Sequence[RankOutcome]) -> list[int]:
    """Return the ranks with the same outcome as `root`."""
    return [outcome.rank for outcome in outcomes if _key(outcome) == _key(root) or _repeats(outcome, root)]


def summary(root: RankOutcome, outcomes: Sequence[RankOutcome], here: str) -> list[str]:
    """Return lines on all ranks: first `root`, then other outcomes, last the consequences of a lost rank."""
    same = alike(root, outcomes)
    rest = [outcome for outcome in outcomes if outcome.rank not in same]
    consequences = [outcome for outcome in rest if consequence(root) is None and consequence(outcome) is not None]
    rest = [outcome for outcome in rest if outcome not in consequences]
    return [
        f"{ranks_text(same)}: {_describe(root, here)[0]}",
        *outcome_lines(rest, here),
        *_consequence_lines(consequences, here),
    ]


def _repeats(outcome: RankOutcome, root: RankOutcome) -> bool:
    """Return whether the rank of `outcome` has failed in the same example as `root`, in the same way."""
    error = None if outcome.report is None else outcome.report.exception
    return error is not None and error.own and error.peer == root.rank


def _key(outcome: RankOutcome) -> object:
    """Return a value that is equal for outcomes that the same text describes."""
    if outcome.report is None:
        return (outcome.ending, outcome.text, outcome.log if outcome.ending != "hung" else where(outcome.stack))
    longrepr = outcome.report.report.get("longrepr")
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else longrepr
    later = _key(outcome.later) if outcome.later is not None else None
    return (outcome.ending, tuple(sorted(crash.items())) if isinstance(crash, dict) else crash, later)


def outcome_lines(outcomes: Sequence[RankOutcome], here: str) -> list[str]:
    """Return lines on `outcomes`; ranks with the same outcome share them."""
    groups: dict[object, list[RankOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_key(outcome), []).append(outcome)
    lines = []
    for group in groups.values():
        first, *more = _describe(group[0], here)
        lines += [f"{ranks_text([outcome.rank for outcome in group])}: {first}", *(f"    {line}" for line in more)]
    return lines


def _consequence_lines(outcomes: Sequence[RankOutcome], here: str) -> list[str]:
    """Return a line for each place in the code at which ranks failed because of another rank.

    The texts of these errors contain addresses, and so differ between ranks.
    """
    groups: dict[str, list[int]] = {}
    for outcome in outcomes:
        groups.setdefault(f"{consequence(outcome)}{_crash_place(outcome, here)}", []).append(outcome.rank)
    return [f"{ranks_text(ranks)}: failed as a consequence: {said}" for said, ranks in groups.items()]


def _crash_place(outcome: RankOutcome, here: str) -> str:
    """Return the last place of the traceback that is not in a library; the place of the failure if there is none."""
    longrepr = outcome.report.report.get("longrepr") if outcome.report is not None else None
    if not isinstance(longrepr, dict) or not longrepr.get("reprcrash"):
        return ""
    entries = [entry["data"] or {} for entry in longrepr["reprtraceback"]["reprentries"]]
    places = [*(entry.get("reprfileloc") for entry in entries), longrepr["reprcrash"]]
    own = [place for place in places if place and not is_library(place["path"])] or [longrepr["reprcrash"]]
    return f" at {_relative(here, own[-1]['path'])}:{own[-1]['lineno']}"


def _describe(outcome: RankOutcome, here: str) -> list[str]:
    """Return a line on the outcome of a rank, and for a failure the next lines of its message."""
    first, *more = _describe_report(outcome, here)
    if outcome.later is not None:
        first += f"; {_describe_end(outcome.later, here)}"
    return [first, *more]


def _describe_report(outcome: RankOutcome, here: str) -> list[str]:
    """Return the lines of `_describe`, without the end of the rank in a later phase."""
    if outcome.report is not None and outcome.ending == "failed" and wasxfail(outcome) is None:
        longrepr = outcome.report.report.get("longrepr")
        if isinstance(longrepr, dict) and longrepr.get("reprcrash"):
            crash = longrepr["reprcrash"]
            first, *more = [line for line in crash["message"].splitlines() if line.strip()] or [""]
            place = f" at {_relative(here, crash['path'])}:{crash['lineno']}"
            # Do not show a place in this package's fixtures: their messages are enough.
            place = "" if crash["path"].startswith(PACKAGE) else place
            lines = [f"failed{place}: {first}", *more[:_MORE_LINES]]
            return [cut_end(line, _WIDTH) for line in lines]
        if text := headline(outcome.report.exception):
            return [f"failed: {text}"]
    return [_describe_briefly(outcome, here)]


def headline(error: ExceptionSketch | None) -> str:
    """Return type and first line of an exception, like the last line of a traceback; empty if there is none."""
    if error is None:
        return ""
    name, first = error.qualname.rpartition(".")[2], next(iter(cut_gloo(error.text).splitlines()), "")
    return cut_end(f"{name}: {first}" if first else name, _WIDTH)


def _describe_briefly(outcome: RankOutcome, here: str) -> str:
    if outcome.report is None:
        if outcome.ending == "hung" and not outcome.secondary:
            return f"timed out{_last_place(outcome, here)}"
        if outcome.ending == "hung":
            return _describe_end(outcome, here)
        lines = outcome.text.strip().splitlines() or [outcome.ending]
        return lines[-1] if outcome.ending == "unstarted" else lines[0]
    longrepr = outcome.report.report.get("longrepr")
    if (expected := wasxfail(outcome)) is not None:
        return f"xfailed: {expected.removeprefix('reason: ')}" if outcome.ending == "skipped" else "passed unexpectedly"
    if outcome.ending == "skipped":
        return f"skipped: {reason_of_skip(longrepr)}"
    return outcome.ending


def _describe_end(outcome: RankOutcome, here: str) -> str:
    """Return how a rank ended in a later phase than the judged one, or because of another rank."""
    if outcome.ending == "hung":
        return f"{outcome.text}{_last_place(outcome, here)}"
    return f"{outcome.ending}: {_describe_briefly(outcome, here)}"


def _last_place(outcome: RankOutcome, here: str) -> str:
    if not outcome.stack:
        return SILENT
    at = _relative(here, where(outcome.stack))
    return f"; was at {at}" if at else ""


def _relative(here: str, path: str) -> str:
    """Return `path` relative to the folder `here` if it is below it."""
    return path.removeprefix(f"{here}{os.sep}") if here else path


def wasxfail(outcome: RankOutcome) -> str | None:
    """Return the reason of an xfail mark that the rank added while the test ran; None if there is none."""
    return None if outcome.report is None else outcome.report.report.get("wasxfail")


def stacks(outcomes: Sequence[RankOutcome], findings: Findings) -> list[tuple[str, str]]:
    """Return title and text of each distinct stack: of hung ranks, and of ranks that ran when another died."""
    ends = [outcome.later or outcome for outcome in outcomes]
    own = {end.rank: findings.native.get(end.rank, end.stack) for end in ends if end.stack}
    seen = {rank: stack for rank, stack in findings.at_death.items() if rank not in own}
    return [
        (f"[{ranks_text(ranks)}] {title}" if len(outcomes) > 1 else title, found[ranks[0]])
        for title, found in (("stacks", own), ("stacks at that time", seen))
        for ranks in _by_stack(found)
    ]


def interrupted_lines(world: Interrupted, here: str) -> list[str]:
    """Return the lines about a test that ran when the session was interrupted."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted({**world.ends, **world.stacks}):
        stack = world.stacks.get(rank, "")
        at = f"at {_relative(here, where(stack))}" if where(stack) else "in no code of the test"
        text = world.ends.get(rank) or (at if stack else SILENT.removeprefix("; "))
        by_text.setdefault(text, []).append(rank)
    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items()]
    lines += [shorten_paths(line, here) for line in world.findings.collectives]
    for ranks in _by_stack({rank: stack for rank, stack in world.stacks.items() if stack}):
        lines += [f"--- [{ranks_text(ranks)}] stacks ---", world.stacks[ranks[0]]]
    return lines


def progress(
    test: str, when: When, seconds: float, timeout: float, places: Mapping[int, str], collectives: list[str], here: str
) -> str:
    """Return a line on a `test` that has spent `seconds` in one phase; `places` are the ranks' places in the code."""
    by_text: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_text.setdefault(_relative(here, place), []).append(rank)
    parts = [f"{ranks_text(ranks)} at {place}" for place, ranks in by_text.items()]
    details = "; ".join([*parts, *(shorten_paths(line, here) for line in collectives)])
    text = f"accel: {test} has been in its {when} phase for {seconds:.0f} s (timeout: {timeout:g} s)"
    return f"{text}: {details}" if details else text


def shorten_paths(text: str, here: str) -> str:
    """Return `text` with the places in it relative to the folder `here`."""
    return text.replace(f" at {here}{os.sep}", " at ") if here else text


def _by_stack(stacks: Mapping[int, str]) -> list[list[int]]:
    """Return groups of ranks whose stacks are the same except for the thread ids."""
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        groups.setdefault(_THREAD_ID.sub("", stack), []).append(rank)
    return list(groups.values())
