"""Tests of the merged reports of subtests, and of other reports that a test makes while a phase runs."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_accel.diagnostics.rank_state import Ending, RankOutcome
from pytest_accel.messages.rank_messages import PhaseReport
from pytest_accel.verdict.judgement import Phase, text_longrepr
from pytest_accel.verdict.merged_subtests import failed_numbers, merge
from tests.verdict.phases import world_key

Sent = tuple[int, PhaseReport]


def phase(*endings: Ending, **more: Any) -> Phase:
    """Return a call phase with one ending for each rank."""
    outcomes = [
        RankOutcome(rank, ending, report=PhaseReport(1, "call", {"outcome": ending}, 1.0))
        for rank, ending in enumerate(endings)
    ]
    return Phase(when="call", outcomes=outcomes, key=world_key(len(endings)), place=("test_it.py", 3), **more)


TWO_PASSED = phase("passed", "passed")
THREE_PASSED = phase("passed", "passed", "passed")


def sent(rank: int, outcome: str, message: str | None = "a", **report: Any) -> Sent:
    """Return a rank's report of a subtest with the description `message`; None: a check that is no subtest."""
    longreprs = {
        "failed": text_longrepr(f"assert {rank} == 9", ["the traceback"], ("test_it.py", 7)),
        "skipped": ("test_it.py", 5, "Skipped: no network"),
    }
    data = {"outcome": outcome, "longrepr": longreprs.get(outcome), "nodeid": "test_it.py::test_it", **report}
    if message is not None:
        data["_subtest.context"] = {"msg": message, "kwargs": {}}
    return rank, PhaseReport(1, "call", data)


def outcomes(*reports: Sent, of: Phase = TWO_PASSED) -> list[str]:
    return [data["outcome"] for data in merge(reports, of)]


def text(data: dict[str, Any]) -> list[str]:
    """Return the lines of a merged failure."""
    lines: list[str] = []
    for entry in data["longrepr"]["reprtraceback"]["reprentries"]:
        lines += [line.rstrip("\n") for line in entry["data"]["lines"]]
    return lines


@pytest.mark.parametrize("outcome", ["passed", "skipped", "failed"])
def test_a_subtest_that_ends_alike_on_all_ranks_is_one_report(outcome: str) -> None:
    assert outcomes(sent(0, outcome), sent(1, outcome)) == [outcome]
    assert outcomes(sent(0, outcome), of=phase("passed")) == [outcome]


def test_an_expected_failure_on_all_ranks_stays_one() -> None:
    (merged,) = merge([sent(rank, "skipped", wasxfail="reason: not yet") for rank in (0, 1)], TWO_PASSED)
    assert (merged["outcome"], merged["wasxfail"]) == ("skipped", "reason: not yet")


def test_a_subtest_fails_if_it_fails_on_one_rank() -> None:
    (merged,) = merge([sent(0, "passed"), sent(1, "failed")], TWO_PASSED)
    assert (merged["outcome"], merged["longrepr"]["reprcrash"]["message"]) == ("failed", "rank 1: assert 1 == 9")
    assert merged["longrepr"]["sections"] == [
        ("all ranks", "rank 1: failed at test_it.py:7\nrank 0: passed", "-"),
    ]
    assert merged["nodeid"] == "test_it.py::test_it"


@pytest.mark.parametrize(
    ("other", "line"),
    [({}, "rank 1: skipped: no network"), ({"wasxfail": "reason: not yet"}, "rank 1: xfailed: not yet")],
    ids=["skip", "xfail"],
)
def test_a_subtest_fails_if_only_some_ranks_skip_it(other: dict[str, str], line: str) -> None:
    (merged,) = merge([sent(0, "passed"), sent(1, "skipped", **other)], TWO_PASSED)
    assert merged["outcome"] == "failed"
    assert "wasxfail" not in merged
    assert text(merged) == [
        "the ranks disagree in this subtest: rank 1 skipped, rank 0 ran",
        "",
        "rank 0: passed",
        line,
    ]


@pytest.mark.parametrize("outcome", ["passed", "skipped"])
def test_a_subtest_fails_if_only_some_ranks_report_it(outcome: str) -> None:
    (merged,) = merge([sent(0, outcome), sent(2, outcome)], phase("passed", "passed", "passed"))
    assert merged["outcome"] == "failed"
    did = {
        "passed": "rank 1 did not report it, ranks 0, 2 ran",
        "skipped": "ranks 0, 2 skipped, rank 1 did not report it",
    }
    assert text(merged)[0] == f"the ranks disagree in this subtest: {did[outcome]}"
    assert text(merged)[-1] == "rank 1: did not report it"


def test_ranks_report_a_subtest_equally_often() -> None:
    reports = [sent(0, "passed"), sent(0, "passed"), sent(1, "passed"), sent(0, "passed")]
    first, second, third = merge(reports, TWO_PASSED)
    assert first["outcome"] == "passed"
    assert text(second)[0] == "the ranks disagree in this subtest: rank 1 reported it fewer than 2 times, rank 0 ran"
    assert text(third)[0] == "the ranks disagree in this subtest: rank 1 reported it fewer than 3 times, rank 0 ran"


def numbered(*descriptions: str) -> list[Sent]:
    """Return reports of passed subtests; each description begins with the rank."""
    return [sent(int(text[0]), "passed", f"rank={text}") for text in descriptions]


def test_a_number_that_only_some_ranks_share_with_their_own_is_no_difference() -> None:
    assert outcomes(*numbered("0, seed=0", "1, seed=0")) == ["passed"]
    assert outcomes(*numbered("0, int8, size=2", "1, int8, size=2", "2, int8, size=2"), of=THREE_PASSED) == ["passed"]
    assert outcomes(*numbered("0, lr=1.5, v1.0.1.", "1, lr=1.5, v1.0.1.")) == ["passed"]
    assert outcomes(*numbered("0 of 2: 0", "1 of 2: 1")) == ["passed"]


def test_a_number_that_is_the_ranks_own_in_one_subtest_only_tells_subtests_apart() -> None:
    merged = merge([*numbered("0, i=0", "0, i=1"), *numbered("1, i=0", "1, i=1")], TWO_PASSED)
    assert [(one["outcome"], one["_subtest.context"]["msg"]) for one in merged] == [
        ("passed", "rank=0, i=0"),
        ("passed", "rank=0, i=1"),
    ]
    assert outcomes(*numbered("0, i=0", "0, i=1", "1, i=0")) == ["passed", "failed"]
    assert outcomes(*numbered("0, i=0", "1, i=1")) == ["passed"]  # No other subtest tells what `i` is.


def test_descriptions_may_differ_in_the_ranks_own_number_and_in_addresses() -> None:
    assert outcomes(sent(0, "passed", "cuda:0"), sent(1, "passed", "cuda:1")) == ["passed"]
    assert outcomes(sent(0, "passed", "<M at 0x7f01>"), sent(1, "passed", "<M at 0x7f02>")) == ["passed"]
    assert outcomes(sent(0, "passed", "rank 0"), sent(1, "skipped", "rank 1")) == ["failed"]
    assert outcomes(sent(0, "passed", "part 2"), sent(1, "passed", "part 3")) == ["failed", "failed"]
    assert outcomes(sent(0, "passed", "10"), sent(1, "passed", "11")) == ["failed", "failed"]
    # The same description comes first.
    numbers = [sent(rank, "passed", f"{number}") for rank in (0, 1) for number in (0, 1)]
    assert outcomes(*numbers) == ["passed", "passed"]


@pytest.mark.parametrize("other", ["failed", "died", "hung", "skipped"])
def test_a_subtest_that_a_rank_has_not_reached_is_left_out_unless_it_has_failed(other: Ending) -> None:
    ended = phase("passed", other)
    assert outcomes(sent(0, "passed"), of=ended) == []
    assert outcomes(sent(0, "failed"), of=ended) == ["failed"]
    assert outcomes(sent(0, "passed"), sent(1, "skipped"), of=ended) == ["failed"]


def test_a_test_that_has_failed_before_may_have_other_subtests_in_its_teardown() -> None:
    assert outcomes(sent(0, "passed"), of=phase("passed", "passed", failed_before=True)) == []


def test_a_test_that_all_ranks_skip_has_the_same_subtests_on_all() -> None:
    assert outcomes(sent(0, "passed"), of=phase("skipped", "skipped")) == ["failed"]


def test_a_check_that_only_some_ranks_make_is_no_disagreement() -> None:
    assert outcomes(sent(0, "passed", None)) == ["passed"]
    assert outcomes(sent(1, "skipped", None), sent(0, "passed", None)) == ["skipped", "passed"]
    (merged,) = merge([sent(1, "failed", None)], TWO_PASSED)
    assert merged["longrepr"]["reprcrash"]["message"] == "rank 1: assert 1 == 9"


def test_failed_subtests_and_checks_are_counted() -> None:
    reports = [sent(0, "failed", "a"), sent(1, "passed", "a"), sent(0, "passed", "b"), sent(1, "failed", None)]
    assert failed_numbers(merge(reports, TWO_PASSED)) == {"subtest": 2, "check": 1}
    assert failed_numbers(merge([sent(rank, "passed") for rank in (0, 1)], TWO_PASSED)) == {}
