"""Merges the reports that a test makes in addition to the reports of its phases. Pure functions.

Such a report is about a subtest (of pytest, pytest-subtests or `unittest`), or about a check of the suite that does not
end the test.

A subtest passes only if every rank reports that it has passed. Ranks that skip it while others run it, and ranks that
do not report it, disagree, as with a whole test. A check that only some ranks make is no disagreement.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from pytest_accel.diagnostics.rank_state import RankOutcome
from pytest_accel.messages.rank_messages import PhaseReport
from pytest_accel.verdict.judgement import Phase, judge

_T = TypeVar("_T", bound=Hashable)
_Reports = dict[int, dict[str, Any]]
"""The reports of one subtest, by rank."""
_CONTEXT = "_subtest.context"
"""Key of a subtest's description, in the serialized reports of pytest and of pytest-subtests."""
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)*)")
"""A number in a description. ``1.5`` and ``2.1.0`` are one number, so that no part of it is taken for a rank's."""


def merge(extras: Sequence[tuple[int, PhaseReport]], phase: Phase) -> list[dict[str, Any]]:
    """Return one report for each subtest or check in `extras`, which the ranks have made in `phase`.

    A subtest that some ranks have not reported because the phase ended early for them is left out, unless it has
    failed: the failure of the phase is reported.
    """
    reports = [(rank, extra.report) for rank, extra in extras]
    subtests = [entry for entry in reports if _CONTEXT in entry[1]]
    checks = [entry for entry in reports if _CONTEXT not in entry[1]]
    endings = {outcome.ending for outcome in phase.outcomes if not outcome.expected}
    ended_alike = endings in ({"passed"}, {"skipped"}) and not phase.failed_before
    merged = []
    for (_, number), found in _match(subtests).items():
        if ended_alike or len(found) == len(phase.outcomes) or _has_failed(found):
            merged.append(_judged(found, number, phase))
    results = _grouped((rank, repr((data["outcome"], data.get("longrepr"))), data) for rank, data in checks)
    for found in results.values():
        merged.append(_judged(found, 1, phase) if _has_failed(found) else next(iter(found.values())))
    return merged


def failed_numbers(merged: Iterable[dict[str, Any]]) -> Counter[str]:
    """Return the numbers of failures among the `merged` reports, of subtests and of other checks."""
    return Counter("subtest" if _CONTEXT in data else "check" for data in merged if data["outcome"] == "failed")


def _match(reports: Sequence[tuple[int, dict[str, Any]]]) -> dict[tuple[tuple[str, ...], int], _Reports]:
    """Return the `reports` by subtest: its description, and its number among the subtests of the same description.

    Ranks have the same subtest if its description is the same, except for the rank's own number and for addresses of
    objects: ``subtests.test(rank=rank)``, ``self.subTest(model=model)``.
    """
    neutral = _neutral_descriptions([(rank, repr(data[_CONTEXT])) for rank, data in reports])
    return _grouped((rank, description, data) for description, (rank, data) in zip(neutral, reports, strict=True))


def _neutral_descriptions(descriptions: Sequence[tuple[int, str]]) -> list[tuple[str, ...]]:
    """Return the `descriptions` of ranks, split at numbers, without addresses and without the ranks' own numbers.

    A single description does not tell whether a number that equals its rank is the rank's own: on rank 0,
    ``(rank=0, seed=0)`` has two. So a place in the text counts as the rank's own only if each description that differs
    in numbers alone has its own rank there.
    """
    split = [(rank, _NUMBER.split(_ADDRESS.sub("ADDRESS", text))) for rank, text in descriptions]
    own: dict[tuple[str, ...], set[int]] = {}
    """The places of the ranks' own numbers, by the text between all numbers."""
    for rank, parts in split:
        places = {place for place in range(1, len(parts), 2) if parts[place] == str(rank)}
        own.setdefault(tuple(parts[::2]), places).intersection_update(places)
    return [
        tuple("RANK" if place in own[tuple(parts[::2])] else part for place, part in enumerate(parts))
        for _, parts in split
    ]


def _grouped(entries: Iterable[tuple[int, _T, dict[str, Any]]]) -> dict[tuple[_T, int], _Reports]:
    """Return the reports in `entries` (rank, description, report) by description, number of this description, and rank.

    A rank may have several reports of the same description.
    """
    numbers: Counter[tuple[int, _T]] = Counter()
    groups: dict[tuple[_T, int], _Reports] = {}
    for rank, description, data in entries:
        numbers[rank, description] += 1
        groups.setdefault((description, numbers[rank, description]), {})[rank] = data
    return groups


def _has_failed(reports: _Reports) -> bool:
    return any(data["outcome"] == "failed" for data in reports.values())


def _judged(reports: _Reports, number: int, phase: Phase) -> dict[str, Any]:
    """Return the report of a subtest with the verdict on it; ranks without a report of it are named.

    `number` is that of the subtest among the subtests of the same description.
    """
    absence = "did not report it" if number == 1 else f"reported it fewer than {number} times"
    outcomes = []
    for rank in (one.rank for one in phase.outcomes if not one.expected or one.rank in reports):
        data = reports.get(rank)
        if data is None:
            outcomes.append(RankOutcome(rank, "absent", text=absence))
        else:
            report = PhaseReport(0, phase.when, data)
            outcomes.append(RankOutcome(rank, data["outcome"], report=report))
    place, folders = phase.place, phase.folders
    verdict = judge(Phase(phase.when, outcomes, phase.key, place, folders=folders, is_subtest=True))
    first = reports[min(reports)]
    merged = {name: value for name, value in first.items() if name != "wasxfail"}
    merged |= {
        "outcome": "skipped" if verdict.outcome == "xfailed" else verdict.outcome,
        "longrepr": verdict.longrepr,
        "sections": list(verdict.sections),
        "duration": verdict.duration,
    }
    return merged if verdict.wasxfail is None else merged | {"wasxfail": verdict.wasxfail}
