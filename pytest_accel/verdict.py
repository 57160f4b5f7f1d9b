"""The ranks' outcomes of one phase to one verdict: pure.

A phase has passed only if every rank reported that it passed. Otherwise the precedence is: a rank died or failed, a
rank hung, ranks disagree (some skipped, some ran), all skipped. Among deaths and failures the earliest that is not a
consequence of another comes first.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_accel.consequences import consequence
from pytest_accel.worlds.autopsy import where
from pytest_accel.worlds.messages import ExceptionSketch, Finished, When
from pytest_accel.worlds.outcome import RankOutcome


class RankError(Exception):
    """What is raised in the driver for ranks that have no exception of their own to show."""


class RankDied(RankError):
    """A rank's process ended in the middle of a test."""


class RankHung(RankError):
    """A rank did not come to an end in time."""


class RankUnstarted(RankError):
    """A rank could not start, or has not got the test."""


class RanksDisagree(RankError):
    """Some ranks skipped and some ran, or they issued different numbers of collectives."""


_ERRORS: dict[str, type[RankError]] = {
    "failed": RankError,
    "died": RankDied,
    "hung": RankHung,
    "unstarted": RankUnstarted,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One phase of a test, as all its ranks have it."""

    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    message: str = ""
    """One line: what pytest's short summary shows; for a skip the reason."""
    error: type[RankError] | ExceptionSketch | None = None
    """What to raise in the driver."""
    longrepr: Any = None
    """In the form in which pytest serialises it."""
    sections: tuple[tuple[str, str], ...] = ()
    """Captured output, labelled by rank."""
    wasxfail: str | None = None
    """Set where a rank's own mark, added while the test ran, made it an expected failure or an unexpected pass."""


def judge(
    when: When,
    outcomes: Sequence[RankOutcome],
    *,
    place: tuple[str, int],
    about: str,
    timeout: float,
    here: str = "",
    collectives: Sequence[str] = (),
) -> Verdict:
    """The verdict on phase `when`.

    `place` is the test's file and line, for text that no rank has written; `about` describes the world in a few words;
    a path below the folder `here` is shown as a person in it would type it. `collectives` are lines about those that
    some rank is in.
    """
    sections = _sections(outcomes)
    wrong = [outcome for outcome in outcomes if outcome.ending in ("died", "failed", "unstarted")]
    if wrong:
        root = min(wrong, key=lambda outcome: (_is_consequence(outcome, wrong), outcome.at, outcome.ending != "died"))
        return _failed(when, root, outcomes, place, about, sections, here, collectives)
    hung = [outcome for outcome in outcomes if outcome.ending == "hung"]
    if hung:
        return _failed(when, hung[0], outcomes, place, about, sections, here, collectives, timeout)
    skipped = [outcome for outcome in outcomes if outcome.ending == "skipped"]
    expected = [outcome for outcome in skipped if _wasxfail(outcome) is not None]
    if expected and len(expected) == len(outcomes):
        longrepr = expected[0].report.report["longrepr"] if expected[0].report else None
        reason = _wasxfail(expected[0]) or ""
        return Verdict("xfailed", reason, longrepr=longrepr, sections=sections, wasxfail=reason)
    if skipped and len(skipped) < len(outcomes):
        return _disagreement(when, outcomes, skipped, place, about, sections, here)
    if skipped:
        assert skipped[0].report is not None
        longrepr = skipped[0].report.report["longrepr"]
        return Verdict("skipped", _reason(longrepr), longrepr=longrepr, sections=sections)
    unknown = [outcome for outcome in outcomes if outcome.ending != "passed"]
    if unknown:  # Such as a plugin's own outcome: whatever it means, it is no pass.
        who = ranks_text([outcome.rank for outcome in unknown])
        message = f"{who} reported {unknown[0].ending!r} for the {when} phase, which is no pass, failure or skip"
        longrepr = failure(message, [message, "", *_others(outcomes, here)], place)
        return Verdict("failed", message, RanksDisagree, longrepr, sections)
    unexpected = [text for outcome in outcomes if (text := _wasxfail(outcome)) is not None]
    return Verdict("passed", sections=sections, wasxfail=unexpected[0] if unexpected else None)


def properties(outcomes: Sequence[RankOutcome]) -> list[tuple[str, object]]:
    """What the ranks have recorded (``record_property``): once where all say the same, else labelled by rank."""
    by_name: dict[str, dict[int, list[object]]] = {}
    for outcome in outcomes:
        if outcome.report is not None:
            for name, value in outcome.report.report.get("user_properties", ()):
                by_name.setdefault(name, {}).setdefault(outcome.rank, []).append(value)
    merged: list[tuple[str, object]] = []
    for name, said in by_name.items():
        values = list(said.values())
        if len(said) == len(outcomes) and all(value == values[0] for value in values):
            merged += [(name, value) for value in values[0]]
        else:
            merged += [(f"{name}[rank {rank}]", value) for rank, mine in said.items() for value in mine]
    return merged


def compare_collectives(finished: Mapping[int, Finished]) -> str | None:
    """Where ranks have issued different numbers of collectives in one process group: a sentence; else None."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, left in finished.items():
        for name, (members, number) in left.collectives.items():
            groups.setdefault((name, members), {})[rank] = number
    for (name, members), numbers in groups.items():
        if len(set(numbers.values())) > 1:
            counts = ", ".join(f"rank {rank}: {number}" for rank, number in sorted(numbers.items()))
            return (
                f"the ranks issued different numbers of collectives in process group {name!r} "
                f"(of {ranks_text(members)}), counted since the group was made: {counts}"
            )
    return None


def leftovers(finished: Mapping[int, Finished]) -> list[str]:
    """What the test left changed in its ranks, once for all ranks that have it in common."""
    ranks: dict[str, list[int]] = {}
    for rank, end in sorted(finished.items()):
        for line in end.left:
            ranks.setdefault(line, []).append(rank)
    return [f"{ranks_text(those)} {line}" for line, those in ranks.items()]


def failure(message: str, lines: Sequence[str], place: tuple[str, int]) -> dict[str, Any]:
    """A serialised longrepr for text that is no rank's traceback."""
    crash = {"path": place[0], "lineno": place[1], "message": message}
    entry = {"type": "ReprEntryNative", "data": {"lines": [f"{line}\n" for line in lines], "style": "native"}}
    traceback = {"reprentries": [entry], "extraline": None, "style": "native"}
    return {
        "reprcrash": crash,
        "reprtraceback": traceback,
        "sections": [],
        "chain": [(copy.deepcopy(traceback), dict(crash), None)],
    }


def plain_text(judged: Verdict) -> str:
    """A failure's text where there is no report to graft it on."""
    lines = [judged.message]
    for entry in judged.longrepr["reprtraceback"]["reprentries"]:
        lines += [line.rstrip("\n") for line in entry["data"]["lines"]]
    for name, text, _ in judged.longrepr["sections"]:
        lines += [f"--- {name} ---", text]
    return "\n".join(dict.fromkeys(lines))


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


def _failed(
    when: When,
    root: RankOutcome,
    outcomes: Sequence[RankOutcome],
    place: tuple[str, int],
    about: str,
    sections: tuple[tuple[str, str], ...],
    here: str,
    collectives: Sequence[str],
    timeout: float = 0.0,
) -> Verdict:
    alike = [outcome.rank for outcome in outcomes if _key(outcome) == _key(root)]
    label = ranks_text(alike) if len(outcomes) > 1 else ""
    error: type[RankError] | ExceptionSketch | None
    if root.report is not None:
        longrepr, message = _labelled(root.report.report["longrepr"], label, place)
        error = root.report.exception
    else:
        message, lines = _account(root, label or "the test's process", when, timeout)
        longrepr = failure(message, lines, place)
        error = _ERRORS[root.ending]
    if len(outcomes) > 1:
        lines = [f"{label}: {_tell(root, here)}"]
        others = [outcome for outcome in outcomes if outcome.rank not in alike]
        if _consequence(root) is None:
            after = [outcome for outcome in others if _consequence(outcome) is not None]
            others = [outcome for outcome in others if outcome not in after]
            lines += [*_others(others, here), *_afterwards(after, here)]
        else:
            lines += _others(others, here)
        longrepr["sections"] = [*longrepr["sections"], (f"{label} of {about}", "\n".join(lines), "-")]
    if collectives:
        text = "\n".join(collectives).replace(f" at {here}{os.sep}", " at ") if here else "\n".join(collectives)
        longrepr["sections"] = [*longrepr["sections"], ("collectives", text, "-")]
    for outcome in outcomes:
        extra = f"[rank {outcome.rank}] " if len(outcomes) > 1 else ""
        if outcome.stack:
            longrepr["sections"].append((f"{extra}stacks", outcome.stack, "-"))
        if outcome.log and outcome.ending in ("died", "unstarted"):
            longrepr["sections"].append((f"{extra}last output", outcome.log, "-"))
    return Verdict("failed", message, error or RankError, longrepr, sections)


def _account(root: RankOutcome, who: str, when: When, timeout: float) -> tuple[str, list[str]]:
    """What is said of ranks that could not say it themselves: a line for the summary, and the text."""
    if root.ending == "hung":
        silent = "" if root.stack else f", and {root.text}"
        message = f"{who} did not finish the {when} phase within {timeout:g} s (timeout){silent}"
        return message, [message]
    if root.ending == "unstarted":
        last = root.text.strip().splitlines()[-1] if root.text.strip() else "no reason given"
        return f"{who} could not run the test: {last}", root.text.splitlines()
    first, *rest = root.text.splitlines()
    message = f"{who} {root.ending} in the {when} phase: {first}"
    return message, [message, *rest]


def _disagreement(
    when: When,
    outcomes: Sequence[RankOutcome],
    skipped: Sequence[RankOutcome],
    place: tuple[str, int],
    about: str,
    sections: tuple[tuple[str, str], ...],
    here: str,
) -> Verdict:
    ran = [outcome.rank for outcome in outcomes if outcome not in skipped]
    message = (
        f"the ranks disagree in the {when} phase: {ranks_text([outcome.rank for outcome in skipped])} skipped, "
        f"{ranks_text(ran)} ran"
    )
    longrepr = failure(message, [message, "", *_others(outcomes, here)], place)
    return Verdict("failed", message, RanksDisagree, longrepr, sections)


def _is_consequence(outcome: RankOutcome, wrong: Sequence[RankOutcome]) -> bool:
    """Whether `outcome` only says that another rank is gone, where there is another."""
    return len(wrong) > 1 and _consequence(outcome) is not None


def _consequence(outcome: RankOutcome) -> str | None:
    return None if outcome.report is None else consequence(outcome.report.exception)


def _labelled(longrepr: Any, label: str, place: tuple[str, int]) -> tuple[Any, str]:
    """A copy of a rank's longrepr that says in its crash line whose it is, and that line."""
    if not isinstance(longrepr, dict):
        text = str(longrepr)
        first = text.strip().splitlines()[0] if text.strip() else "failed"
        message = f"{label}: {first}" if label else first
        return failure(message, text.splitlines(), place), message
    longrepr = copy.deepcopy(longrepr)
    crashes = [longrepr["reprcrash"]]
    if longrepr.get("chain"):
        crashes.append(longrepr["chain"][-1][1])
    message = "failed"
    for crash in crashes:
        if crash is not None:
            message = f"{label}: {crash['message']}" if label else crash["message"]
            crash["message"] = message
    return longrepr, message


def _key(outcome: RankOutcome) -> object:
    """Equal for outcomes that one text describes."""
    if outcome.report is None:
        return (outcome.ending, outcome.text, outcome.log if outcome.ending != "hung" else where(outcome.stack))
    longrepr = outcome.report.report.get("longrepr")
    crash = longrepr.get("reprcrash") if isinstance(longrepr, dict) else longrepr
    return (outcome.ending, tuple(sorted(crash.items())) if isinstance(crash, dict) else crash)


def _others(outcomes: Sequence[RankOutcome], here: str) -> list[str]:
    """A line for each different thing that happened."""
    groups: dict[object, list[RankOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_key(outcome), []).append(outcome)
    return [f"{ranks_text([outcome.rank for outcome in group])}: {_tell(group[0], here)}" for group in groups.values()]


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
    own = [place for place in places if place and "site-packages" not in place["path"]] or [longrepr["reprcrash"]]
    return f" at {_from(here, own[-1]['path'])}:{own[-1]['lineno']}"


def _tell(outcome: RankOutcome, here: str) -> str:
    if outcome.report is None:
        if outcome.ending == "hung":
            at = _from(here, where(outcome.stack))
            return f"{outcome.text}, and was ended{f' at {at}' if at else ''}"
        lines = outcome.text.strip().splitlines() or [outcome.ending]
        return lines[-1] if outcome.ending == "unstarted" else lines[0]
    longrepr = outcome.report.report.get("longrepr")
    if (expected := _wasxfail(outcome)) is not None:
        return f"xfailed: {expected.removeprefix('reason: ')}" if outcome.ending == "skipped" else "passed unexpectedly"
    if outcome.ending == "skipped":
        return f"skipped: {_reason(longrepr)}"
    if outcome.ending == "failed" and isinstance(longrepr, dict) and longrepr.get("reprcrash"):
        crash = longrepr["reprcrash"]
        path = _from(here, crash["path"])
        return f"failed at {path}:{crash['lineno']}: {crash['message'].splitlines()[0]}"
    return outcome.ending


def _from(here: str, path: str) -> str:
    """`path` as a person in the folder `here` would type it."""
    return path.removeprefix(f"{here}{os.sep}") if here else path


def _reason(longrepr: Any) -> str:
    text = str(longrepr[2]) if isinstance(longrepr, (tuple, list)) and len(longrepr) == 3 else str(longrepr)
    return text.removeprefix("Skipped: ")


def _wasxfail(outcome: RankOutcome) -> str | None:
    return None if outcome.report is None else outcome.report.report.get("wasxfail")


def _sections(outcomes: Sequence[RankOutcome]) -> tuple[tuple[str, str], ...]:
    """Captured output by rank; what all ranks that have a section wrote alike stands there once."""
    merged: dict[tuple[str, str], list[int]] = {}
    for outcome in outcomes:
        if outcome.report is not None:
            for name, text in outcome.report.report.get("sections", ()):
                merged.setdefault((name, text), []).append(outcome.rank)
    if len(outcomes) == 1:
        return tuple(merged)
    return tuple((f"{name} [{ranks_text(ranks)}]", text) for (name, text), ranks in merged.items())
