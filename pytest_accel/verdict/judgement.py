"""Merges the ranks' outcomes of one phase into one verdict. Pure functions.

A phase has passed only if every rank reported that it passed. Otherwise the precedence is: a rank died or failed, a
rank hung, ranks disagree (some skipped, some ran), all skipped. Of several deaths and failures, the verdict names the
earliest that is not a consequence of another.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_accel.core.rank_messages import ExceptionSketch, Finished, When
from pytest_accel.core.rank_names import ranks_text
from pytest_accel.diagnostics.diagnosis import NOTHING, Findings
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.rank.collectives import group_label
from pytest_accel.verdict import report_text
from pytest_accel.verdict.report_text import is_consequence


class RankError(Exception):
    """Raised in the driver for a failure for which no rank has reported an exception."""


class RankDied(RankError):
    """A rank's process ended in the middle of a test."""


class RankHung(RankError):
    """A rank did not finish in time."""


class RankUnstarted(RankError):
    """A rank could not start, or could not run the test."""


class RanksDisagree(RankError):
    """Some ranks skipped and some ran, or they issued different numbers of collectives."""


class LeftBehind(RankError):
    """The test has leaked something in its ranks (``--accel-leaks``)."""


_ERRORS: dict[str, type[RankError]] = {
    "failed": RankError,
    "died": RankDied,
    "hung": RankHung,
    "unstarted": RankUnstarted,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one phase of a test, merged over its ranks."""

    outcome: Literal["passed", "failed", "skipped", "xfailed"]
    message: str = ""
    """The line that pytest's short summary shows; for a skip the reason."""
    error: type[RankError] | ExceptionSketch | None = None
    """The exception to raise in the driver."""
    longrepr: Any = None
    """pytest's representation of the failure, serialized as pytest does it."""
    sections: tuple[tuple[str, str], ...] = ()
    """Title and text of captured output, labelled by rank."""
    wasxfail: str | None = None
    """The reason of an xfail mark that a rank added while the test ran; None if there was none."""


def judge(
    when: When,
    outcomes: Sequence[RankOutcome],
    *,
    place: tuple[str, int],
    about: str,
    here: str = "",
    findings: Findings = NOTHING,
) -> Verdict:
    """Return the verdict on phase `when`.

    `place` is the test's file and line, shown for failures that have no traceback. `about` describes the world in a few
    words. Paths below the folder `here` are shown relative to it.
    """
    sections = _captured_output(outcomes)
    wrong = [outcome for outcome in outcomes if outcome.ending in ("died", "failed", "unstarted")]
    if wrong:
        root = min(wrong, key=lambda outcome: (is_consequence(outcome, wrong), outcome.at, outcome.ending != "died"))
        return _failed(when, root, outcomes, place, about, sections, here, findings)
    skipped = [outcome for outcome in outcomes if outcome.ending == "skipped"]
    hung = [outcome for outcome in outcomes if outcome.ending == "hung"]
    if skipped and hung and all(outcome.secondary for outcome in hung):
        return _disagreement(when, outcomes, skipped, place, about, sections, here, findings)
    if hung:
        return _failed(when, min(hung, key=_is_secondary), outcomes, place, about, sections, here, findings)
    expected = [outcome for outcome in skipped if report_text.wasxfail(outcome) is not None]
    if expected and len(expected) == len(outcomes):
        longrepr = expected[0].report.report["longrepr"] if expected[0].report else None
        reason = report_text.wasxfail(expected[0]) or ""
        return Verdict("xfailed", reason, longrepr=longrepr, sections=sections, wasxfail=reason)
    if skipped and len(skipped) < len(outcomes):
        return _disagreement(when, outcomes, skipped, place, about, sections, here, findings)
    if skipped:
        assert skipped[0].report is not None
        longrepr = skipped[0].report.report["longrepr"]
        return Verdict("skipped", report_text.reason(longrepr), longrepr=longrepr, sections=sections)
    unknown = [outcome for outcome in outcomes if outcome.ending != "passed"]
    if unknown:  # For example an outcome that a plugin has added: anything unknown is not a pass.
        who = ranks_text([outcome.rank for outcome in unknown])
        message = f"{who} reported {unknown[0].ending!r} for the {when} phase, which is no pass, failure or skip"
        longrepr = failure(message, [message, "", *report_text.others(outcomes, here)], place)
        return Verdict("failed", message, RanksDisagree, longrepr, sections)
    unexpected = [text for outcome in outcomes if (text := report_text.wasxfail(outcome)) is not None]
    return Verdict("passed", sections=sections, wasxfail=unexpected[0] if unexpected else None)


def properties(outcomes: Sequence[RankOutcome]) -> list[tuple[str, object]]:
    """Return the properties that ranks recorded (``record_property``), labelled by rank where ranks differ."""
    by_name: dict[str, dict[int, list[object]]] = {}
    for outcome in outcomes:
        if outcome.report is not None:
            for name, value in outcome.report.report.get("user_properties", ()):
                by_name.setdefault(name, {}).setdefault(outcome.rank, []).append(value)
    merged: list[tuple[str, object]] = []
    for name, by_rank in by_name.items():
        values = list(by_rank.values())
        if len(by_rank) == len(outcomes) and all(value == values[0] for value in values):
            merged += [(name, value) for value in values[0]]
        else:
            merged += [(f"{name}[rank {rank}]", value) for rank, own in by_rank.items() for value in own]
    return merged


def compare_collectives(finished: Mapping[int, Finished]) -> str | None:
    """Return a message if ranks issued different numbers of collectives in a process group, else None."""
    groups: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, left in finished.items():
        for name, (members, number) in left.collectives.items():
            groups.setdefault((name, members), {})[rank] = number
    for (name, members), numbers in groups.items():
        if len(set(numbers.values())) > 1:
            counts = ", ".join(f"rank {rank}: {number}" for rank, number in sorted(numbers.items()))
            return (
                f"the ranks issued different numbers of collectives in {group_label(name)} "
                f"({ranks_text(members)}), counted since the group was made: {counts}"
            )
    return None


def leftovers(finished: Mapping[int, Finished]) -> list[str]:
    """Return a line for each leak of the test, with the ranks in which it occurred."""
    ranks: dict[str, list[int]] = {}
    for rank, message in sorted(finished.items()):
        for line in message.leaks:
            ranks.setdefault(line, []).append(rank)
    return [f"{ranks_text(leaking)} {line}" for line, leaking in ranks.items()]


def failure(message: str, lines: Sequence[str], place: tuple[str, int]) -> dict[str, Any]:
    """Return a serialized longrepr for a text that is not a traceback of a rank."""
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
    """Return the text of a failure that is raised without a report of its own."""
    lines = [judged.message]
    for entry in judged.longrepr["reprtraceback"]["reprentries"]:
        lines += [line.rstrip("\n") for line in entry["data"]["lines"]]
    for name, text, _ in judged.longrepr["sections"]:
        lines += [f"--- {name} ---", text]
    return "\n".join(dict.fromkeys(lines))


def _failed(
    when: When,
    root: RankOutcome,
    outcomes: Sequence[RankOutcome],
    place: tuple[str, int],
    about: str,
    sections: tuple[tuple[str, str], ...],
    here: str,
    findings: Findings,
) -> Verdict:
    label = ranks_text(report_text.alike(root, outcomes)) if len(outcomes) > 1 else ""
    error: type[RankError] | ExceptionSketch | None
    if root.report is not None:
        error = root.report.exception
        longrepr, message = _labelled(root.report.report["longrepr"], error, label, place)
    else:
        who = label or "the test's process"
        if root.ending == "hung" and root.stack and len(outcomes) > 1:  # Name all hung ranks, wherever they hung.
            hung = [outcome for outcome in outcomes if outcome.ending == "hung"]
            who = ranks_text([outcome.rank for outcome in hung if outcome.secondary == root.secondary])
        message, lines = _describe(root, who, when)
        longrepr = failure(message, lines, place)
        error = _ERRORS[root.ending]
    if len(outcomes) > 1:
        lines = report_text.summary(root, outcomes, here)
        longrepr["sections"] = [*longrepr["sections"], (f"{label} of {about}", "\n".join(lines), "-")]
    longrepr["sections"] += _diagnosis(outcomes, here, findings)
    for outcome in outcomes:
        extra = f"[rank {outcome.rank}] " if len(outcomes) > 1 else ""
        if outcome.log and outcome.ending in ("died", "unstarted"):
            longrepr["sections"].append((f"{extra}last output", outcome.log, "-"))
    return Verdict("failed", message, error or RankError, longrepr, sections)


def _diagnosis(outcomes: Sequence[RankOutcome], here: str, findings: Findings) -> list[tuple[str, str, str]]:
    """Return report sections with the stacks and collectives of ranks that were inspected from outside."""
    sections = report_text.stacks(outcomes, findings)
    if findings.collectives:
        sections.insert(0, ("collectives", report_text.shorten_paths("\n".join(findings.collectives), here)))
    return [(title, text, "-") for title, text in sections]


def _is_secondary(outcome: RankOutcome) -> bool:
    return outcome.secondary


def _describe(root: RankOutcome, who: str, when: When) -> tuple[str, list[str]]:
    """Return the summary line and the text for a rank that could not report its failure itself."""
    if root.ending == "hung":
        message = f"{who} {root.text}{'' if root.stack else report_text.SILENT}"
        return message, [message]
    if root.ending == "unstarted":
        *before, last = root.text.strip().splitlines() or ["no reason given"]
        return f"{who} could not run the test: {last}", root.text.splitlines() if before else []
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
    findings: Findings,
) -> Verdict:
    ran = [outcome.rank for outcome in outcomes if outcome not in skipped]
    message = (
        f"the ranks disagree in the {when} phase: {ranks_text([outcome.rank for outcome in skipped])} skipped, "
        f"{ranks_text(ran)} ran"
    )
    longrepr = failure(message, [message, "", *report_text.others(outcomes, here)], place)
    longrepr["sections"] += _diagnosis(outcomes, here, findings)
    return Verdict("failed", message, RanksDisagree, longrepr, sections)


def _labelled(longrepr: Any, error: ExceptionSketch | None, label: str, place: tuple[str, int]) -> tuple[Any, str]:
    """Return a copy of a rank's longrepr with `label` in its crash line, and that line."""
    # Items other than functions (a doctest, a notebook cell) have plain text.
    if not isinstance(longrepr, dict):
        text = str(longrepr)
        first = report_text.headline(error) or next((line for line in text.splitlines() if line.strip()), "failed")
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


def _captured_output(outcomes: Sequence[RankOutcome]) -> tuple[tuple[str, str], ...]:
    """Return title and text of the captured output; ranks that wrote the same text share one section."""
    merged: dict[tuple[str, str], list[int]] = {}
    for outcome in outcomes:
        end = outcome.later or outcome
        reported = outcome.report.report.get("sections", ()) if outcome.report is not None else ()
        for name, text in dict.fromkeys(map(tuple, (*reported, *end.sections))):
            merged.setdefault((name, text), []).append(outcome.rank)
    if len(outcomes) == 1:
        return tuple(merged)
    return tuple((f"{name} [{ranks_text(ranks)}]", text) for (name, text), ranks in merged.items())
