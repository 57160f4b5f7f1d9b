"""Text about each rank in a report; ranks with the same outcome share a line.

Pure functions, except that the source lines at which ranks stand are read from their files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pytest_accel.core.frames import PACKAGE, Folders
from pytest_accel.core.rank_messages import ExceptionSketch, When
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.core.skip_text import reason_of_skip
from pytest_accel.core.truncation import cut_end, cut_gloo
from pytest_accel.diagnostics.collectives import describe_waits, differences, waiting_in
from pytest_accel.diagnostics.diagnosis import Findings, Interrupted
from pytest_accel.diagnostics.exit_status import describe_exit, describe_hang
from pytest_accel.diagnostics.python_stacks import frames_of_rank, has_finished, where
from pytest_accel.diagnostics.rank_state import HangCause, RankOutcome
from pytest_accel.diagnostics.source_lines import stack_text, threads_text
from pytest_accel.verdict.secondary_failures import Consequence, consequence

_WIDTH = 200
"""Characters of a line. Longer lines are truncated."""
ALONE = "the test's process"
"""The name of the only rank of a test in its message."""
_CAUSES = {"died": "died", "failed": "failed", "unstarted": "could not run the test"}
_MORE_LINES = 6
"""Lines of a rank's failure message that are shown after the first."""
_MISSING_FIXTURE = (pytest.FixtureLookupError.__module__, pytest.FixtureLookupError.__qualname__)
_THREAD_ID = re.compile(r"^Thread [0-9]+ ", re.MULTILINE)
"""The process id in py-spy's line on a thread."""


def alike(root: RankOutcome, outcomes: Sequence[RankOutcome]) -> list[int]:
    """Return the ranks with the same outcome as `root`."""
    return [outcome.rank for outcome in outcomes if _key(outcome) == _key(root) or _repeats(outcome, root)]


def summary(root: RankOutcome, outcomes: Sequence[RankOutcome], folders: Folders) -> list[str]:
    """Return lines on all ranks: first `root`, then other outcomes, last the consequences of a lost rank.

    The line on `root` does not repeat the message above it.
    """
    same = alike(root, outcomes)
    rest = [outcome for outcome in outcomes if outcome.rank not in same]
    consequences = [outcome for outcome in rest if consequence(root) is None and consequence(outcome) is not None]
    rest = [outcome for outcome in rest if outcome not in consequences]
    return [
        f"{ranks_text(same)}: {_describe_root(root, folders, len(same))}",
        *outcome_lines(rest, folders),
        *_consequence_lines(consequences, f"{ranks_text(same)} {_CAUSES.get(root.ending, root.ending)}", folders),
    ]


def _repeats(outcome: RankOutcome, root: RankOutcome) -> bool:
    """Return whether the rank of `outcome` has failed in the same example as `root`, in the same way."""
    error = None if outcome.report is None else outcome.report.exception
    return error is not None and error.own and error.peer == root.rank


def _key(outcome: RankOutcome) -> object:
    """Return a value that is equal for outcomes that the same text describes."""
    if outcome.report is None:
        return (outcome.ending, outcome.text, outcome.hang, outcome.log, where(frames_of_rank(outcome.stack)))
    longrepr = outcome.report.report.get("longrepr")
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else longrepr
    later = _key(outcome.later) if outcome.later is not None else None
    if crash is None:
        return (outcome.ending, headline(outcome.report.exception), later)
    return (outcome.ending, tuple(sorted(crash.items())) if isinstance(crash, dict) else crash, later)


def outcome_lines(outcomes: Sequence[RankOutcome], folders: Folders) -> list[str]:
    """Return lines on `outcomes`; ranks with the same outcome share them."""
    groups: dict[object, list[RankOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_key(outcome), []).append(outcome)
    lines = []
    for group in groups.values():
        first, *more = _describe(group[0], folders, len(group))
        lines += [f"{ranks_text([outcome.rank for outcome in group])}: {first}", *(f"    {line}" for line in more)]
    return lines


def _consequence_lines(outcomes: Sequence[RankOutcome], cause: str, folders: Folders) -> list[str]:
    """Return a line for each place in the code at which ranks failed because of the `cause`, such as ``rank 1 died``.

    The texts of these errors contain addresses, and so differ between ranks.
    """
    groups: dict[str, list[RankOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_describe_consequence(outcome, cause, folders, 1), []).append(outcome)
    return [
        f"{ranks_text([one.rank for one in group])}: {_describe_consequence(group[0], cause, folders, len(group))}"
        for group in groups.values()
    ]


def _describe_consequence(outcome: RankOutcome, cause: str, folders: Folders, number: int) -> str:
    """Return the text of a line about this `number` of ranks."""
    meaning, place = consequence(outcome), _crash_place(outcome, folders)
    if meaning is Consequence.JOB_ENDED and outcome.exit is not None:
        return f"failed as a consequence: {describe_exit(outcome.exit)}"
    if meaning is Consequence.FAILED_EXAMPLE and outcome.report is not None and outcome.report.exception is not None:
        return f"failed as a consequence: an example failed on rank {outcome.report.exception.peer}{place}"
    if meaning is Consequence.LOST_CONNECTION:
        text = "lost its connection" if number == 1 else "lost their connection"
    else:
        broken = meaning is Consequence.BROKEN_BARRIER
        text = "found a broken barrier" if broken else "timed out waiting for another rank"
    return f"{text} after {cause}{',' if place else ''}{place}"


def _crash_place(outcome: RankOutcome, folders: Folders) -> str:
    """Return the place of the failure, after "at", or "" if the report has none."""
    if (place := place_of(outcome)) is None:
        return ""
    path, line = place
    return f" at {folders.shown(path)}:{line}"


def place_of(outcome: RankOutcome) -> tuple[str, int] | None:
    """Return the file and line of the failure that the rank has reported; None if it has reported none."""
    if outcome.report is None:
        return None
    if (place := outcome.report.report.get("accel_place")) is not None:
        return place[0], place[1]
    crash = _crash_of(outcome)
    return None if crash is None else (crash["path"], crash["lineno"])


def _describe_root(root: RankOutcome, folders: Folders, number: int) -> str:
    """Return the text of `_describe` without what the message of the failure says."""
    text = root.ending if root.report is None else _without_message(root, folders)
    if wasxfail(root) is not None:
        text = _describe_briefly(root, folders, number)
    elif root.ending == "hung":
        assert root.hang is not None
        text = {HangCause.PHASE_TIMEOUT: "timed out", HangCause.DEADLOCK: "in a deadlock"}.get(root.hang.cause, "hung")
    elif root.ending == "unstarted":
        text = "could not run the test"
    return text if root.later is None else f"{text}; {_describe_end(root.later, folders, number)}"


def _without_message(outcome: RankOutcome, folders: Folders) -> str:
    """Return the outcome and its place; the messages of this package's fixtures are enough without a place."""
    crash = _crash_of(outcome)
    place = "" if crash is not None and crash["path"].startswith(PACKAGE) else _crash_place(outcome, folders)
    return f"{outcome.ending}{place}"


def _crash_of(outcome: RankOutcome) -> Mapping[str, Any] | None:
    longrepr = outcome.report.report.get("longrepr") if outcome.report is not None else None
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else None
    return crash or None


def _describe(outcome: RankOutcome, folders: Folders, number: int) -> list[str]:
    """Return a line on the outcome of this `number` of ranks, and for a failure the next lines of its message."""
    first, *more = _describe_report(outcome, folders, number)
    if outcome.later is not None:
        first += f"; {_describe_end(outcome.later, folders, number)}"
    return [first, *more]


def _describe_report(outcome: RankOutcome, folders: Folders, number: int) -> list[str]:
    """Return the lines of `_describe`, without the end of the rank in a later phase."""
    if outcome.report is not None and outcome.ending == "failed" and wasxfail(outcome) is None:
        if (crash := _crash_of(outcome)) is not None:
            first, *more = [line for line in crash["message"].splitlines() if line.strip()] or [""]
            lines = [f"{_without_message(outcome, folders)}: {first}", *more[:_MORE_LINES]]
            return [cut_end(line, _WIDTH) for line in lines]
        if text := headline(outcome.report.exception):
            return [f"{_without_message(outcome, folders)}: {text}"]
    return [_describe_briefly(outcome, folders, number)]


def headline(error: ExceptionSketch | None) -> str:
    """Return type and first line of an exception, like the last line of a traceback; empty if there is none.

    Without the type for a missing fixture, as in pytest's report of it.
    """
    if error is None:
        return ""
    name, first = error.qualname.rpartition(".")[2], next(iter(cut_gloo(error.text).splitlines()), "")
    if (error.module, error.qualname) == _MISSING_FIXTURE:
        return cut_end(first, _WIDTH)
    return cut_end(f"{name}: {first}" if first else name, _WIDTH)


def _describe_briefly(outcome: RankOutcome, folders: Folders, number: int) -> str:
    if outcome.report is None:
        if outcome.hang is not None:
            return describe_stop(outcome, folders, number)
        if outcome.ending == "died":
            return f"{_first_line(outcome)}{_place(outcome, folders)}"
        if outcome.headline:
            return outcome.headline
        lines = outcome.text.strip().splitlines() or [outcome.ending]
        return lines[-1] if outcome.ending == "unstarted" else lines[0]
    longrepr = outcome.report.report.get("longrepr")
    if (expected := wasxfail(outcome)) is not None:
        return f"xfailed: {expected.removeprefix('reason: ')}" if outcome.ending == "skipped" else "passed unexpectedly"
    if outcome.ending == "skipped":
        return f"skipped: {reason_of_skip(longrepr)}"
    return outcome.ending


def _describe_end(outcome: RankOutcome, folders: Folders, number: int) -> str:
    """Return how a rank ended in a later phase than the judged one."""
    text = _describe_briefly(outcome, folders, number)
    return text if outcome.hang is not None or outcome.ending == "died" else f"{outcome.ending}: {text}"


def _place(outcome: RankOutcome, folders: Folders) -> str:
    """Return `` at file:line in function`` of a rank that reported its stack; empty if there is no such place."""
    frame = where(frames_of_rank(outcome.stack), folders)
    return "" if frame is None else f" at {frame.where(folders)}"


def _first_line(outcome: RankOutcome) -> str:
    return next(iter(outcome.text.strip().splitlines()), outcome.ending)


def describe_death(outcome: RankOutcome, folders: Folders, number: int) -> str:
    """Return what to say of this `number` of ranks that died: ``was killed by SIGSEGV at test_x.py:3 in test_y``."""
    be = "was" if number == 1 else "were"
    text = _first_line(outcome) if outcome.exit is None else describe_exit(outcome.exit, be)
    return f"{text}{_place(outcome, folders)}"


def describe_stop(outcome: RankOutcome, folders: Folders, number: int) -> str:
    """Return what to say of this `number` of ranks that hung."""
    assert outcome.hang is not None
    text, place = describe_hang(outcome.hang, "was" if number == 1 else "were"), _place(outcome, folders)
    if not outcome.stack:
        return f"{text}; {_describe_silence(number)}"
    if outcome.secondary and place:
        return f"still running{place} when {'it' if number == 1 else 'they'} {text}"
    return f"{text}{place}"


def _describe_silence(number: int) -> str:
    """Return what to say of this `number` of ranks whose stacks could not be taken."""
    return f"{'does' if number == 1 else 'do'} not respond to signals"


def describe_timeout(
    outcomes: Sequence[RankOutcome], hung: Sequence[RankOutcome], findings: Findings, folders: Folders
) -> str:
    """Return the message for ranks that timed out or are in a deadlock.

    It says where each of `hung` is, those first that wait in no collective. If all wait in collectives that differ, it
    says only how.
    """
    assert hung[0].hang is not None
    is_deadlock = hung[0].hang.cause is HangCause.DEADLOCK
    about = "deadlock" if is_deadlock else describe_hang(hung[0].hang)
    found = differences(findings.records)
    if found and all(waiting_in(findings.records.get(outcome.rank, {})) for outcome in hung):
        return f"{about}: {'; '.join(found)}"
    by_position: dict[_Position, list[int]] = {}
    for outcome in hung:
        frame, one = where(frames_of_rank(outcome.stack), folders), waiting_in(findings.records.get(outcome.rank, {}))
        place = "" if frame is None else frame.place(folders)
        position = _Position("" if one is None else one.name, place, not outcome.stack)
        by_position.setdefault(position, []).append(outcome.rank)
    parts = [
        f"{ranks_text(ranks) if len(outcomes) > 1 else ALONE} {position.predicate(len(ranks))}"
        for position, ranks in sorted(by_position.items(), key=lambda item: bool(item[0].collective))
    ]
    for ending, what in (("passed", "finished"), ("skipped", "skipped")):
        if ranks := [one.rank for one in outcomes if one.ending == ending and one.later not in hung]:
            has = "had" if not is_deadlock else "has" if len(ranks) == 1 else "have"
            parts.append(f"{ranks_text(ranks)} {has} {what}{' the test' if is_deadlock else ''}")
    return f"{about}: {'; '.join(parts + found)}"


class _Position(NamedTuple):
    """The position of a rank when it timed out."""

    collective: str
    """The collective in which it waited; empty if it waited in none."""
    place: str
    """File and line of the test; empty if it ran no code of the test."""
    silent: bool
    """True if its stack could not be taken."""

    def predicate(self, number: int) -> str:
        """Return what to say of this `number` of ranks."""
        be, at = "is" if number == 1 else "are", f" at {self.place}" if self.place else ""
        if self.collective:
            return f"{be} stuck in {self.collective}{at}"
        if self.silent:
            return _describe_silence(number)
        return f"{be}{at or ' in no code of the test'}"


def wasxfail(outcome: RankOutcome) -> str | None:
    """Return the reason of an xfail mark that the rank added while the test ran; None if there is none."""
    return None if outcome.report is None else outcome.report.report.get("wasxfail")


def collective_lines(stacks: Mapping[int, str], findings: Findings, folders: Folders) -> list[str]:
    """Return lines on the collectives in which ranks wait, and on the ranks that have not reached them."""
    if findings.unrecorded_by:
        return [f"the collectives are unknown: torch {findings.unrecorded_by} does not record them; torch 2.8 does"]
    frames = {rank: where(frames_of_rank(stack), folders) for rank, stack in stacks.items()}
    places = {rank: frame.where(folders) for rank, frame in frames.items() if frame is not None}
    return describe_waits(findings.records, places)


def stacks(
    outcomes: Sequence[RankOutcome], shown: RankOutcome | None, findings: Findings, folders: Folders
) -> list[tuple[str, str]]:
    """Return title and text of each place at which ranks hung, crashed, or were when another rank died.

    The frames of the rank of `shown` are left out: they are the traceback of the failure.
    """
    ends = [outcome.later or outcome for outcome in outcomes]
    own = {end.rank: stack_text(end.stack, folders) for end in ends if end.stack}
    threads = {end.rank: text for end in ends if (text := threads_text(end.stack, folders))}
    seen = {rank: stack_text(stack, folders) for rank, stack in findings.at_death.items() if rank not in own}
    if shown is not None:
        above = stack_text(shown.stack, folders)
        own = {rank: text for rank, text in own.items() if text != above}
    found = (
        ("stacks", own),
        ("stacks of other threads", threads),
        ("stacks at that time", seen),
        ("native frames", findings.native),
    )
    return [
        (f"[{ranks_text(ranks)}] {title}" if len(outcomes) > 1 else title, texts[ranks[0]])
        for title, texts in found
        for ranks in _alike(texts)
    ]


def interrupted_lines(world: Interrupted, folders: Folders) -> list[str]:
    """Return the lines about a test that ran when the session was interrupted."""
    by_text: dict[str, list[int]] = {}
    finished = {rank for rank, stack in world.stacks.items() if has_finished(frames_of_rank(stack))}
    for rank in sorted({**world.ends, **world.stacks}):
        stack = world.stacks.get(rank, "")
        frame = where(frames_of_rank(stack), folders)
        at = "in no code of the test" if frame is None else f"at {frame.where(folders)}"
        at = "finished the test" if rank in finished else at
        text = world.ends.get(rank) or (at if stack else "")
        by_text.setdefault(text, []).append(rank)
    lines = [f"{ranks_text(ranks)}: {text or _describe_silence(len(ranks))}" for text, ranks in by_text.items()]
    lines += collective_lines(world.stacks, world.findings, folders)
    texts = {rank: stack_text(stack, folders) for rank, stack in world.stacks.items() if stack and rank not in finished}
    for ranks in _alike(texts):
        lines += [f"--- [{ranks_text(ranks)}] stacks ---", texts[ranks[0]]]
    return lines


def progress(
    test: str,
    when: When,
    seconds: float,
    timeout: float,
    places: Mapping[int, str],
    collectives: list[str],
    folders: Folders,
) -> str:
    """Return a line on a `test` that has spent `seconds` in one phase; `places` are the ranks' places in the code."""
    details = "; ".join(place_parts(places, collectives, folders))
    text = f"accel: {test} has been in its {when} phase for {seconds:.0f} s (timeout: {timeout:g} s)"
    return f"{text}: {details}" if details else text


def place_parts(places: Mapping[int, str], collectives: Sequence[str], folders: Folders) -> list[str]:
    """Return texts that say at which of `places` in the code the ranks are, then the lines on their `collectives`."""
    by_text: dict[str, list[int]] = {}
    for rank, place in places.items():
        by_text.setdefault(folders.shown(place), []).append(rank)
    parts = [f"{ranks_text(ranks)} at {place}" for place, ranks in by_text.items()]
    return [*parts, *collectives]


def _alike(texts: Mapping[int, str]) -> list[list[int]]:
    """Return groups of ranks whose texts are the same except for process ids."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(_THREAD_ID.sub("", text), []).append(rank)
    return list(groups.values())
