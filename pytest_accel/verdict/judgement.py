"""Merges the ranks' outcomes of one phase into one verdict.

Pure functions, except that the source lines at which ranks stand are read from their files.

A phase has passed only if every rank reported that it passed. Otherwise the precedence is: a rank died or failed, a
rank hung, ranks disagree (some skipped, some ran), all skipped. Of several deaths and failures, the verdict names the
earliest that is not a consequence of another. A rank whose call has ended as all ranks have announced (`expected_ends`)
counts as passed, and an announced end that has not come fails the call. A phase that has passed on all ranks still
fails for a failed subtest (call, teardown), and for a mismatch of collectives or groups, an error in stale
fixtures or a leak (teardown).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from marshal import loads
from typing import Any, Literal

from msgspec import Struct, field, structs

from pytest_accel.compat.pytest_shims import reason_of_skip
from pytest_accel.core.frames import Folders
from pytest_accel.core.record_events import RankPhase
from pytest_accel.core.stash_keys import REPLACED
from pytest_accel.core.truncation import ranks_text
from pytest_accel.core.world_key import WorldKey
from pytest_accel.diagnostics.collectives import waiting_in
from pytest_accel.diagnostics.python_stacks import Frame, frames_of_rank, shown_frames, source_of, where
from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.messages.flight_record import FlightRecord
from pytest_accel.messages.rank_messages import UNEVEN_COLLECTIVES, Announced, ExceptionSketch, Finished, When
from pytest_accel.verdict import expected_ends, sentences
from pytest_accel.verdict.causes import Cause, CauseKind, cause_of, consequence
from pytest_accel.verdict.mismatches import have_different_groups, have_unmet_messages
from pytest_accel.verdict.phase_verdict import Verdict

_PLAIN_REPORT = frozenset(("outcome", "duration", "start", "stop"))
"""The fields that each report of a phase has (`rank.reports.phase_data`)."""


class Phase(Struct, frozen=True):
    """Everything from which the verdict on one phase of a test follows, or on a subtest (see `merged_subtests`)."""

    when: When
    outcomes: Sequence[RankOutcome]
    """The outcomes of all ranks but those whose end was reported with an earlier phase; see `reported_ends`."""
    key: WorldKey
    """Key of the world in which the test runs."""
    place: tuple[str, int]
    """File and line of the test, shown for failures that have no traceback."""
    folders: Folders = Folders()
    """The folders by which paths are shown."""
    records: Mapping[int, FlightRecord] = field(default_factory=dict)
    """The records of the living ranks of a test that failed."""
    is_subtest: bool = False
    """True if the outcomes belong to a subtest in this phase."""
    failed_subtests: Mapping[str, int] = field(default_factory=dict)
    """The numbers of failed subtests and other checks of the phase, by the word for them; see `merged_subtests`."""
    failed_before: bool = False
    """True if an earlier phase of the test has failed. Leaks and mismatches are not reported in addition."""
    announced: Sequence[Announced] = ()
    """The announcements of each rank of the test. `expected_ends.marked` marks the outcomes of the call."""
    finished: Mapping[int, Finished] = field(default_factory=dict)
    """The last message of each rank that reached the end of the test. Empty before the teardown."""
    leaks: Literal["warn", "fail", "off"] = "fail"
    """Treatment of a leak."""
    late_errors: Sequence[str] = ()
    """Errors of fixtures that were torn down after the test, because its world runs no further test."""


def plain_pass(
    outcomes: Sequence[RankOutcome], announced: Sequence[Announced], finished: Mapping[int, Finished]
) -> Verdict | None:
    """Return the verdict on a phase that all ranks have passed alike, and that leaves nothing to report or to do.

    Return None for any other phase. `judge` comes to the same verdict, and takes several times as long.
    """
    for one in outcomes:
        if one.ending != "passed" or one.report is None or one.later is not None:
            return None
        if one.report.plugin_data or not one.report.report.keys() <= _PLAIN_REPORT:
            return None
    left = [*finished.values()]
    if any(one.ends or one.missing_faults for one in announced) or any(
        one != Finished(one.serial, left[0].uses, groups=left[0].groups) for one in left
    ):
        return None
    if any(use.messages for one in left[:1] for use in one.uses.values()):
        return None
    return Verdict("passed", duration=max(map(_seconds, outcomes)), ranks=tuple(map(_rank_phase, outcomes)))


def judge(phase: Phase) -> Verdict:
    """Return the verdict on `phase`."""
    is_announced = any(one.ends for one in phase.announced)
    outcomes = phase.outcomes
    verdict = _merge(phase)
    if phase.when == "call":
        verdict = _compare_with_announced(verdict, phase)
    if verdict.outcome == "passed" and phase.failed_subtests:
        text = sentences.failed_subtests(phase.failed_subtests)
        verdict = _with_problems(verdict, Cause(CauseKind.FAILED, "subtests"), [text], phase)
    if phase.finished:
        verdict = _add_end_of_test(verdict, phase)
    sent = {one.rank: one.report.plugin_data for one in outcomes if one.report is not None}
    return structs.replace(
        verdict,
        duration=max(map(_seconds, outcomes), default=0.0),
        properties=(*verdict.properties, *_end_properties(phase.finished, phase.key.ranks), *properties(outcomes)),
        ranks=tuple(map(_rank_phase, outcomes)),
        rank_data={rank: loads(data) for rank, data in sent.items() if data},
        # If ranks end the phase, or a subtest, differently, a rank may have sent a message that nobody has read.
        # A wider fixture may have done so, too, and the next test that uses this world need not have this fixture.
        retire=verdict.retire
        or (phase.when != "teardown" and (len({one.ending for one in outcomes}) > 1 or bool(phase.failed_subtests)))
        or is_announced,
    )


def reported_ends(verdict: Verdict, outcomes: Sequence[RankOutcome]) -> set[int]:
    """Return the ranks whose end is part of the report of a phase with this `verdict` and these `outcomes`."""
    expected = {one.rank for one in outcomes if one.expected and one.report is None}
    shown = {one.rank for one in outcomes if one.report is None or one.later} if verdict.outcome == "failed" else set()
    return expected | shown


def _compare_with_announced(verdict: Verdict, phase: Phase) -> Verdict:
    """Return `verdict`, or a failure, with the planned faults and the announced ends that have not come.

    A test may fail, or be skipped, before a fault comes. Then that alone is reported, unless ends were announced.
    """
    is_announced = any(one.ends for one in phase.announced)
    ends = expected_ends.agreed(phase.announced)
    # A rank that was stopped because of another rank could not end as announced.
    done = {one.rank for one in phase.outcomes if one.expected or one.secondary}
    missing = [end for end in ends if end.rank is not None and end.rank not in done]
    faults = {rank: one.missing_faults for rank, one in enumerate(phase.announced) if one.missing_faults}
    texts = []
    if faults and (is_announced or verdict.outcome == "passed"):
        texts.append(sentences.missing_faults(faults))
    if missing:
        texts.append(sentences.announcement(missing))
    elif is_announced and not ends:
        texts.append(sentences.no_agreement([one.ends for one in phase.announced]))
    if not texts:
        return verdict
    text = "; ".join(texts)
    if verdict.outcome == "failed":
        return _with_addition(verdict, text)
    ranks = [*faults, *(end.rank for end in missing if end.rank is not None)]
    what = "planned fault" if faults else "announced end"
    cause = Cause(CauseKind.FAILED, what, tuple(dict.fromkeys(ranks)))
    message = f"the test {verdict.outcome}; {text}"
    return _with_problems(verdict, cause, [message, "", *sentences.outcome_lines(phase.outcomes, phase.folders)], phase)


def _with_addition(verdict: Verdict, text: str) -> Verdict:
    """Return the failure `verdict` with `text` added to the first line of its message."""
    first, *rest = verdict.message.split("\n")
    message = "\n".join([f"{first}; {text}", *rest])
    longrepr = copy.deepcopy(verdict.longrepr)
    for crash in _crashes(longrepr):
        crash["message"] = message
    longrepr["sections"] = [*longrepr["sections"], ("announced", text, "-")]
    return structs.replace(verdict, message=message, longrepr=longrepr)


def _seconds(outcome: RankOutcome) -> float:
    """Return the duration of the phase in a rank, and of a later phase in which the rank has ended: both are judged."""
    ended = 0.0 if outcome.later is None else _seconds(outcome.later)
    if outcome.report is not None:
        return float(outcome.report.report.get("duration", 0.0)) + ended
    start, stop = outcome.span
    return stop - start


def _rank_phase(outcome: RankOutcome) -> RankPhase:
    if outcome.report is None:
        return RankPhase(outcome.rank, "stopped" if outcome.secondary else outcome.ending, *outcome.span)
    report = outcome.report.report
    start, stop = report.get("start", 0.0), report.get("stop", 0.0)
    if outcome.later is not None:
        stop = max(stop, outcome.later.span[1])
    return RankPhase(outcome.rank, outcome.ending, start, stop, outcome.report.collectives)


def _add_end_of_test(verdict: Verdict, phase: Phase) -> Verdict:
    """Return `verdict` with what follows from the ranks' last messages."""
    finished = phase.finished.values()
    ends = expected_ends.agreed(phase.announced)
    uneven = sentences.uneven_collectives_lines(phase.finished)
    groups = sentences.uneven_groups_lines(phase.finished)
    kill_reason = next(iter(uneven + groups), None)
    missed = []
    if UNEVEN_COLLECTIVES in ends and not uneven:
        missed = [f"the test passed; {sentences.announcement([UNEVEN_COLLECTIVES])}"]
    if ends:
        # Other ranks notice an end at different times, and lose collectives that torch has started itself. No later
        # test meets what is left of them: the ranks are replaced.
        uneven = []
    # Ranks that issue different numbers of collectives wait for each other: the numbers say why.
    is_uneven = bool(uneven or groups or ends)
    unawaited = [] if is_uneven else sentences.unawaited_lines(phase.finished, phase.folders)
    leaks = sentences.leak_lines(phase.finished)
    leaking = [(rank, leak) for rank, left in sorted(phase.finished.items()) for leak in left.leaks]
    kinds = ", ".join(dict.fromkeys(leak.kind.value for _, leak in leaking))
    late = [left.late_teardown_error for left in finished if left.late_teardown_error]
    found = [
        (Cause(CauseKind.FAILED, "announced end"), missed),
        (Cause(CauseKind.DISAGREED, "collectives"), uneven),
        (Cause(CauseKind.DISAGREED, "process groups"), groups),
        (Cause(CauseKind.FAILED, "unawaited collective"), unawaited),
        (Cause(CauseKind.FAILED, "late teardown"), [*late, *phase.late_errors]),
        (
            Cause(CauseKind.LEAKED, kinds, tuple(dict.fromkeys(rank for rank, _ in leaking))),
            leaks if phase.leaks == "fail" else [],
        ),
    ]
    if phase.failed_before:  # Mismatches and leaks are then consequences. Errors of fixtures are reported as by pytest.
        found = [one for one in found if one[0].detail == "late teardown"]
    problems = [line for _, lines in found for line in lines]
    if problems and verdict.outcome == "passed":
        cause = next(cause for cause, lines in found if lines)
        verdict = _with_problems(verdict, cause, problems, phase)
    doubts = dict.fromkeys(left.doubt for left in finished if left.doubt)
    if have_unmet_messages(phase.finished):
        doubts[sentences.UNMET_MESSAGES] = None
    if len({left.groups for left in finished}) > 1 or have_different_groups(phase.finished):
        doubts[sentences.OTHER_GROUPS] = None
    return structs.replace(
        verdict,
        properties=((REPLACED, "; ".join(doubts)),) if doubts else (),
        retire=bool(doubts),
        warnings=tuple(warning for left in finished for warning in left.warnings),
        leak_warnings=tuple(leaks) if phase.leaks == "warn" else (),
        kill_reason=kill_reason or next(iter(unawaited), None),
    )


def _with_problems(verdict: Verdict, cause: Cause, problems: Sequence[str], phase: Phase) -> Verdict:
    """Return a failure because of `problems`, with the captured output of `verdict`, which has passed."""
    lines = "\n".join(problems).splitlines()
    longrepr = text_longrepr(lines[0], lines, phase.place)
    return Verdict("failed", lines[0], cause, longrepr=longrepr, sections=verdict.sections)


def _merge(phase: Phase) -> Verdict:
    """Return the verdict that follows from the ranks' own outcomes."""
    sections = _captured_output(phase)
    outcomes = [outcome for outcome in phase.outcomes if not outcome.expected]
    if all(outcome.ending == "passed" for outcome in outcomes):
        unexpected = [text for outcome in outcomes if (text := sentences.wasxfail(outcome)) is not None]
        return Verdict("passed", sections=sections, wasxfail=unexpected[0] if unexpected else None)
    wrong = [outcome for outcome in outcomes if outcome.ending in ("died", "failed", "unstarted")]
    if wrong:
        root = min(wrong, key=lambda one: (consequence(one) is not None, one.at, one.ending != "died"))
        return _rank_failure(phase, root, sections)
    skipped = [outcome for outcome in outcomes if outcome.ending == "skipped"]
    hung = [outcome for outcome in outcomes if outcome.ending == "hung"]
    if skipped and hung and all(outcome.secondary for outcome in hung):
        return _disagreement(phase, sections)
    if hung:
        return _rank_failure(phase, min(hung, key=partial(_position, phase)), sections)
    expected = [outcome for outcome in skipped if sentences.wasxfail(outcome) is not None]
    if expected and len(expected) == len(phase.outcomes):
        longrepr = expected[0].report.report["longrepr"] if expected[0].report else None
        reason = sentences.wasxfail(expected[0]) or ""
        return Verdict("xfailed", reason, longrepr=longrepr, sections=sections, wasxfail=reason)
    if skipped and len(skipped) == len(phase.outcomes):
        # The report of a rank that called pytest.xfail has a traceback, and no reason of a skip.
        report = next(outcome.report for outcome in skipped if outcome not in expected)
        assert report is not None
        longrepr = report.report["longrepr"]
        return Verdict("skipped", reason_of_skip(longrepr), longrepr=longrepr, sections=sections)
    # Also for an outcome that a plugin has added: anything unknown is not a pass.
    return _disagreement(phase, sections)


def _position(phase: Phase, hung: RankOutcome) -> tuple[bool, bool]:
    """Return the sort key of a rank that `hung`: the ranks that others wait for come first."""
    return hung.secondary, waiting_in(phase.records.get(hung.rank)) is not None


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


def _end_properties(finished: Mapping[int, Finished], size: int) -> list[tuple[str, object]]:
    """Return the properties of the ranks' last messages, labelled by rank if the world has several."""
    return [
        (f"{name}[rank {rank}]" if size > 1 else name, value)
        for rank, left in sorted(finished.items())
        for name, value in left.properties.items()
    ]


def text_longrepr(message: str, lines: Sequence[str], place: tuple[str, int]) -> dict[str, Any]:
    """Return a serialized longrepr for a text that is not a traceback of a rank."""
    crash = {"path": place[0], "lineno": place[1], "message": message}
    data = {"lines": [f"{line}\n" for line in lines], "style": "native"}
    return _longrepr([{"type": "ReprEntryNative", "data": data}], crash)


def _source_longrepr(stack: str, message: str, lines: Sequence[str], phase: Phase) -> dict[str, Any]:
    """Return a serialized longrepr for a rank with this `stack`: its source lines, and `lines` at the last of them."""
    shown = shown_frames(frames_of_rank(stack))
    frame = where(frames_of_rank(stack), phase.folders)
    if frame is None or not shown:
        return text_longrepr(message, lines, phase.place)
    entries = [_source_entry(one, [], phase.folders) for one in shown[:-1]]
    entries.append(_source_entry(shown[-1], [f"E   {line}" for line in lines], phase.folders))
    return _longrepr(entries, {"path": frame.path, "lineno": frame.line, "message": message})


def _source_entry(frame: Frame, lines: Sequence[str], folders: Folders) -> dict[str, Any]:
    place = {"path": folders.shown(frame.path), "lineno": frame.line, "message": f"in {frame.function}"}
    data = {
        "lines": [*source_of(frame), *lines],
        "reprfuncargs": None,
        "reprlocals": None,
        "reprfileloc": place,
        "style": "short",
    }
    return {"type": "ReprEntry", "data": data}


def _longrepr(entries: Sequence[dict[str, Any]], crash: dict[str, Any]) -> dict[str, Any]:
    traceback = {"reprentries": [*entries], "extraline": None, "style": "long"}
    return {
        "reprcrash": crash,
        "reprtraceback": traceback,
        "sections": [],
        "chain": [(copy.deepcopy(traceback), dict(crash), None)],
    }


def _rank_failure(phase: Phase, root: RankOutcome, sections: tuple[tuple[str, str], ...]) -> Verdict:
    """Return the failure of `phase` that the outcome `root` has caused."""
    outcomes = phase.outcomes
    same = sentences.alike(root, outcomes, phase.folders)
    label = ranks_text(same) if phase.key.ranks > 1 else ""
    says_all = bool(root.headline) and len(same) == len(outcomes)  # There is nothing to say about single ranks.
    error = None if root.report is None else root.report.exception
    cause = cause_of(root, same)
    if root.report is not None:
        longrepr, message = _labelled(root.report.report["longrepr"], error, label, phase.place)
    else:
        message, lines = root.headline, root.text.splitlines()
        if not says_all:
            message, lines = sentences.failure_message(
                root, same, phase.key.ranks, outcomes, phase.when, phase.records, phase.folders
            )
        longrepr = _source_longrepr(root.stack, message, lines, phase)
    if label and not says_all:
        _put_above(longrepr, f"{label} of {phase.key.about}")
        lines = sentences.summary(root, same, outcomes, phase.folders)
        longrepr["sections"] = [*longrepr["sections"], ("all ranks", "\n".join(lines), "-")]
    elif phase.key.fake_size is not None:
        _put_above(longrepr, phase.key.about)
    longrepr["sections"] += _diagnosis(phase, root)
    place = sentences.place_of(root)
    return Verdict("failed", message, cause, error, longrepr, sections, place=place)


def _put_above(longrepr: Any, line: str) -> None:
    """Put `line` above the traceback of a serialized failure, in place.

    The line is a traceback by itself, the first in the chain. Plugins for reports read the last, or `reprtraceback`.
    """
    chain = longrepr.get("chain") or copy.deepcopy([(longrepr["reprtraceback"], longrepr["reprcrash"], None)])
    entries = chain[0][0]["reprentries"]
    blank = "" if entries and entries[0]["data"].get("style") == "long" else "\n"  # Long entries have it already.
    above = {"reprentries": [], "extraline": f"{line}{blank}", "style": "long"}
    longrepr["chain"] = [(above, None, None), *chain]


def _diagnosis(phase: Phase, root: RankOutcome | None) -> list[tuple[str, str, str]]:
    """Return report sections with the stacks and collectives of ranks that were inspected from outside.

    The stack of `root` is left out: it is the traceback of the failure.
    """
    ends = [outcome.later or outcome for outcome in phase.outcomes]
    stacks = {end.rank: end.stack for end in ends if end.stack}
    sections = sentences.stacks(phase.outcomes, root, phase.key.ranks, phase.folders)
    if lines := sentences.collective_lines(stacks, phase.records, phase.folders):
        sections.insert(0, ("collectives", "\n".join(lines)))
    return [(title, text, "-") for title, text in sections]


def _disagreement(phase: Phase, sections: tuple[tuple[str, str], ...]) -> Verdict:
    """Return the failure of a phase or subtest that some ranks skipped or did not report, and others ran."""
    message = sentences.disagreement(phase.outcomes, phase.when, is_subtest=phase.is_subtest)
    longrepr = text_longrepr(
        message, [message, "", *sentences.outcome_lines(phase.outcomes, phase.folders)], phase.place
    )
    longrepr["sections"] += _diagnosis(phase, None)
    skips = any(outcome.ending == "skipped" for outcome in phase.outcomes)
    cause = Cause(CauseKind.DISAGREED, "skip" if skips else "subtest")
    return Verdict("failed", message, cause, longrepr=longrepr, sections=sections)


def _labelled(longrepr: Any, error: ExceptionSketch | None, label: str, place: tuple[str, int]) -> tuple[Any, str]:
    """Return a copy of a rank's longrepr with `label` in its crash line, and that line."""
    # Items other than functions (a doctest, a notebook cell) have plain text.
    if not isinstance(longrepr, dict):
        text = str(longrepr)
        first = sentences.headline(error) or next((line for line in text.splitlines() if line.strip()), "failed")
        message = f"{label}: {first}" if label else first
        return text_longrepr(message, text.splitlines(), place), message
    longrepr = copy.deepcopy(longrepr)
    crashes = _crashes(longrepr)
    text = crashes[-1]["message"] if crashes else sentences.headline(error) or "failed"
    message = f"{label}: {text}" if label else text
    for crash in crashes:
        crash["message"] = message
    return longrepr, message


def _crashes(longrepr: Any) -> list[dict[str, Any]]:
    """Return the entries of a serialized failure that have its message; none if all frames are hidden."""
    last = (longrepr.get("chain") or [])[-1:]
    return [crash for crash in (longrepr["reprcrash"], *(entry[1] for entry in last)) if crash is not None]


def _captured_output(phase: Phase) -> tuple[tuple[str, str], ...]:
    """Return title and text of the captured output; ranks that wrote the same text share one section."""
    merged: dict[tuple[str, str], list[int]] = {}
    for outcome in phase.outcomes:
        end = outcome.later or outcome
        reported = outcome.report.report.get("sections", ()) if outcome.report is not None else ()
        if reported or end.sections:
            for name, text in dict.fromkeys(map(tuple, (*reported, *end.sections))):
                merged.setdefault((name, text), []).append(outcome.rank)
    if phase.key.ranks == 1:
        return tuple(merged)
    return tuple((f"{name} [{ranks_text(ranks)}]", text) for (name, text), ranks in merged.items())
