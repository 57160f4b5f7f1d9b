"""Tests of the verdict on a phase: the merged outcomes of all ranks, and the text of the failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from marshal import dumps
from typing import Any

import pytest
from msgspec import structs

from pytest_accel.core.record_events import RankPhase
from pytest_accel.core.stash_keys import REPLACED
from pytest_accel.diagnostics.rank_state import Hang, HangCause, RankOutcome
from pytest_accel.messages.rank_messages import ExceptionSketch, Finished, GroupUse, Leak, LeakKind, PhaseReport, When
from pytest_accel.verdict import sentences
from pytest_accel.verdict.causes import Cause, CauseKind
from pytest_accel.verdict.judgement import plain_pass, properties, reported_ends, text_longrepr
from pytest_accel.verdict.phase_verdict import Verdict
from tests.flight_records import entry, record
from tests.verdict.phases import (
    OUTPUT,
    PLACE,
    STACK,
    died,
    failed,
    hung,
    judged,
    passed,
    reported,
    sections,
    skipped,
    summary,
    terminated,
    traceback_lines,
    world_key,
)

THREAD = Leak(LeakKind.THREAD, "mine")


def kind(*outcomes: RankOutcome) -> CauseKind | None:
    """Return the kind of the cause of a failure with `outcomes`."""
    cause = judged(*outcomes).cause
    return None if cause is None else cause.kind


def test_a_test_passes_if_all_ranks_have_passed() -> None:
    verdict = Verdict("passed", ranks=(RankPhase(0, "passed"), RankPhase(1, "passed")))
    finished = dict.fromkeys(range(2), Finished(1))
    assert judged(passed(0), passed(1)) == plain_pass([passed(0), passed(1)], [], finished) == verdict


@pytest.mark.parametrize("outcome", [failed(1), died(1), hung(1), skipped(1), RankOutcome(1, "unstarted", text="no")])
def test_one_rank_that_has_not_passed_fails_the_test(outcome: RankOutcome) -> None:
    for outcomes in ([passed(0), outcome], [outcome, passed(0)], [passed(0), outcome, passed(2)]):
        assert judged(*outcomes).outcome == "failed"


def test_a_failure_has_the_message_and_traceback_of_its_rank() -> None:
    verdict = judged(passed(0), failed(1))
    assert verdict.message == "rank 1: assert 0 == 1"
    assert verdict.cause == Cause(CauseKind.FAILED, "AssertionError", (1,))
    assert verdict.error == ExceptionSketch("builtins", "AssertionError", "assert 0 == 1")
    assert verdict.longrepr["reprcrash"] == {"path": "test_it.py", "lineno": 7, "message": "rank 1: assert 0 == 1"}
    assert verdict.longrepr["chain"][-1][1]["message"] == "rank 1: assert 0 == 1"
    assert traceback_lines(verdict) == ["rank 1 of 2 on sim", "", "the traceback"]
    assert summary(verdict) == (
        "all ranks",
        ["rank 1: failed at test_it.py:7", "rank 0: passed"],
    )


def test_failures_of_which_all_frames_are_hidden_are_told_apart_by_their_exceptions() -> None:
    def hidden(rank: int, text: str) -> RankOutcome:
        longrepr = text_longrepr("", ["the traceback"], PLACE) | {"reprcrash": None}
        longrepr["chain"] = [(longrepr["reprtraceback"], None, None)]
        return reported(rank, "failed", rank, ExceptionSketch("builtins", "ValueError", text), longrepr=longrepr)

    verdict = judged(passed(0), hidden(1, "one"), hidden(2, "one"), hidden(3, "other"))
    assert verdict.message == "ranks 1-2: ValueError: one"
    assert summary(verdict)[1] == ["ranks 1-2: failed", "rank 0: passed", "rank 3: failed: ValueError: other"]
    assert judged(hidden(0, "one")).message == "ValueError: one"


def test_a_failure_of_a_single_process_has_no_rank_number() -> None:
    verdict = judged(failed(0))
    assert verdict.message == "assert 0 == 1"
    assert verdict.longrepr["sections"] == []
    assert judged(died(0)).message == "the test's process was killed by SIGSEGV"


def test_failures_with_different_texts_are_not_equal() -> None:
    verdict = judged(failed(0, "assert 1 == 2"), failed(1, "assert 1 == 3", at=2))
    assert verdict.message == "rank 0: assert 1 == 2"
    assert summary(verdict)[1][1:] == ["rank 1: failed at test_it.py:7: assert 1 == 3"]


def test_the_earliest_failure_is_the_cause() -> None:
    assert judged(failed(0, "late", at=2), failed(1, "early", at=1)).message == "rank 1: early"
    assert kind(failed(0, "late", at=2), died(1, at=1)) is CauseKind.DIED
    assert judged(failed(0, "early", at=1), died(1, at=2)).message == "rank 0: early"


def test_of_a_simultaneous_failure_and_death_the_death_is_the_cause() -> None:
    assert judged(failed(0), died(1)).message == "rank 1 was killed by SIGSEGV"


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:41209",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:550] Read error: Connection reset by peer",
        "writev [127.0.0.1]:3321: Broken pipe",
        "Socket Timeout",
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.5",
        "NCCL communicator was aborted on rank 1.",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_an_error_about_a_lost_peer_is_not_the_cause(text: str) -> None:
    lost = failed(0, text, at=1)
    for cause in (died(1, at=2), failed(1, "ValueError: wrong", at=2), RankOutcome(1, "unstarted", 2.0, text="no")):
        verdict = judged(lost, cause)
        assert verdict.message.startswith("rank 1")
        (last,) = [line for line in summary(verdict)[1] if line.startswith("rank 0")]
        assert re.fullmatch(r"rank 0: (lost|timed out) .* after rank 1 (died|failed|could .*), at test_it.py:7", last)


def test_equal_secondary_failures_at_one_place_are_reported_once() -> None:
    texts = [f"Connection closed by peer [127.0.0.1]:{port}" for port in (1, 2)]
    outcomes = [failed(0, texts[0]), failed(1, texts[1]), died(2, at=2), passed(3), failed(4, texts[0], line=8)]
    lost = "lost its connection after rank 2 died"
    assert summary(judged(*outcomes))[1] == [
        "rank 2: died",
        "rank 3: passed",
        f"ranks 0-1: {lost.replace('its', 'their')}, at test_it.py:7",
        f"rank 4: {lost}, at test_it.py:8",
    ]


def test_the_place_of_a_failure_is_the_one_that_the_rank_has_reported() -> None:
    lost = failed(0, "Broken pipe", accel_place=("test_it.py", 279))
    judgement = judged(lost, died(1))
    assert summary(judgement)[1][-1].endswith("its connection after rank 1 died, at test_it.py:279")
    assert judgement.place is None
    assert judged(failed(0, accel_place=("test_it.py", 279)), passed(1)).place == ("test_it.py", 279)
    assert judged(failed(0, line=8), passed(1)).place == ("test_it.py", 8)


def test_an_error_about_a_lost_peer_is_the_cause_if_there_is_no_other() -> None:
    text = "Connection closed by peer"
    assert judged(passed(0), failed(1, text)).message == f"rank 1: {text}"
    assert judged(failed(0, text, at=2, line=8), failed(1, text, at=1)).message == f"rank 1: {text}"


def test_precedence_is_death_failure_hang_disagreement() -> None:
    outcomes: list[RankOutcome] = [skipped(0), passed(1)]
    assert kind(*outcomes) is CauseKind.DISAGREED
    outcomes.append(hung(2))
    assert kind(*outcomes) is CauseKind.HUNG
    # Ranks hang because another rank failed, although the hang was reported first.
    outcomes.append(failed(3, at=99))
    assert judged(*outcomes).message == "rank 3: assert 0 == 1"
    outcomes.append(died(4, at=98))
    assert kind(*outcomes) is CauseKind.DIED


def test_a_death_has_its_signal_and_the_last_output() -> None:
    verdict = judged(
        passed(0),
        died(1, number=signal.SIGABRT, sections=(("Captured stderr setup", "terminate called"),)),
        when="setup",
    )
    assert verdict.cause == Cause(CauseKind.DIED, "SIGABRT", (1,))
    assert verdict.message == "rank 1 was killed by SIGABRT in the setup phase"
    assert verdict.longrepr["reprcrash"] == {"path": "test_it.py", "lineno": 3, "message": verdict.message}
    assert traceback_lines(verdict) == ["rank 1 of 2 on sim", "", verdict.message]
    assert verdict.sections == (("Captured stderr setup [rank 1]", "terminate called"),)


def test_deaths_are_equal_also_if_their_output_differs() -> None:
    different = [died(rank, sections=(("Captured stdout call", f"of {rank}"),)) for rank in range(2)]
    assert judged(*different).message == "ranks 0-1 were killed by SIGSEGV"


def test_a_hang_shows_where_every_rank_is() -> None:
    verdict = judged(passed(0), hung(1), hung(2))
    assert verdict.cause == Cause(CauseKind.HUNG, "phase timeout", (1, 2))
    assert verdict.message == "timed out after 5 s: ranks 1-2 are at test_it.py:12; rank 0 had finished"
    assert summary(verdict) == ("all ranks", ["ranks 1-2: timed out after 5 s", "rank 0: passed"])
    assert traceback_lines(verdict) == [
        "ranks 1-2 of 3 on sim",
        "",
        "test_it.py:12: in test_it",
        "torch/distributed/distributed_c10d.py:3000: in all_reduce",
        f"E   {verdict.message}",
    ]
    assert list(sections(verdict)) == ["all ranks"]


def test_hangs_at_different_places_are_reported_separately() -> None:
    verdict = judged(hung(0), hung(1, STACK.replace("line 12", "line 30")))
    assert verdict.message == "timed out after 5 s: rank 0 is at test_it.py:12; rank 1 is at test_it.py:30"
    late = "timed out after 5 s"
    assert summary(verdict)[1] == [f"rank 0: {late}", f"rank 1: {late} at test_it.py:30 in test_it"]
    assert sections(verdict)["[rank 1] stacks"].splitlines()[0] == "test_it.py:30 in test_it"


def test_a_hang_names_the_difference_between_collectives() -> None:
    calls = dict(enumerate(record(entry(1, name, done=False)) for name in ("barrier", "all_reduce")))
    tensor = "(float32[2, 3])"
    each = f"rank 0 barrier {tensor}, rank 1 all_reduce {tensor}"
    difference = f"the ranks called different operations as collective #1: {each}"
    for cause, about in ((HangCause.PHASE_TIMEOUT, "timed out after 5 s"), (HangCause.DEADLOCK, "deadlock")):
        ranks = [hung(rank)._replace(hang=Hang(cause, 5, "call")) for rank in (0, 1)]
        assert judged(*ranks, records=calls).message == f"{about}: {difference}"


def test_a_hung_rank_without_a_stack_does_not_respond_to_signals() -> None:
    verdict = judged(passed(0), hung(1, ""))
    assert verdict.message == "timed out after 5 s: rank 1 does not respond to signals; rank 0 had finished"
    assert traceback_lines(verdict) == ["rank 1 of 2 on sim", "", verdict.message]
    assert list(sections(verdict)) == ["all ranks"]


def test_a_hang_of_a_single_process_has_no_rank_number() -> None:
    assert judged(hung(0)).message == "timed out after 5 s: the test's process is at test_it.py:12"
    in_library = 'Thread 0x1 (most recent call first):\n  File "/venv/lib/python3.12/queue.py", line 3 in get'
    assert judged(hung(0, in_library)).message.endswith("the test's process is in no code of the test")


def test_a_crash_shows_the_place_and_the_frames() -> None:
    crash = died(1, stack=f"Fatal Python error: Fault\n\n{STACK}")
    verdict = judged(passed(0), crash)
    assert verdict.message == "rank 1 was killed by SIGSEGV at test_it.py:12 in test_it"
    assert traceback_lines(verdict)[0] == "rank 1 of 2 on sim"
    assert traceback_lines(verdict)[-1] == f"E   {verdict.message}"
    assert verdict.longrepr["reprcrash"]["path"] == "/home/me/test_it.py"
    assert verdict.longrepr["reprcrash"]["lineno"] == 12
    assert summary(verdict)[1] == ["rank 1: died", "rank 0: passed"]
    assert summary(judged(failed(0, at=0.5), crash))[1][1] == "rank 1: killed by SIGSEGV at test_it.py:12 in test_it"


def test_a_terminated_rank_is_reported_below_the_event_that_terminated_it() -> None:
    verdict = judged(skipped(0), terminated(1, RankOutcome(0, "skipped")))
    assert verdict.cause == Cause(CauseKind.DISAGREED, "skip")
    assert verdict.message == "the ranks disagree in the call phase: rank 0 skipped, rank 1 ran"
    lines = traceback_lines(verdict)
    running = "still running at test_it.py:12 in test_it when it was stopped 3 s after"
    assert f"rank 1: {running} rank 0 skipped" in lines
    assert sections(verdict)["[rank 1] stacks"].startswith("test_it.py:12 in test_it\n")
    assert [(rank.rank, rank.ending) for rank in verdict.ranks] == [(0, "skipped"), (1, "stopped")]
    assert verdict.sections == (("Captured stdout call [rank 1]", OUTPUT[1]),)
    verdict = judged(hung(0), terminated(1, RankOutcome(0, "hung")))
    assert verdict.message.startswith("timed out after 5 s: rank 0 is")
    assert [rank.ending for rank in verdict.ranks] == ["hung", "stopped"]
    # The others have passed, and wait for nothing.
    verdict = judged(passed(0), terminated(1, RankOutcome(0, "passed")))
    assert summary(verdict)[1] == ["rank 1: was stopped 3 s after rank 0 finished the call", "rank 0: passed"]


def test_the_end_of_a_rank_in_a_later_phase_is_reported_with_the_failure() -> None:
    ended = passed(0)._replace(later=terminated(0, RankOutcome(1, "failed")))
    verdict = judged(ended, failed(1, sections=[OUTPUT]), passed(2)._replace(later=died(2)))
    assert verdict.message == "rank 1: assert 0 == 1"
    assert summary(verdict)[1] == [
        "rank 1: failed at test_it.py:7",
        "rank 0: passed; still running at test_it.py:12 in test_it when it was stopped 3 s after rank 1 failed",
        "rank 2: passed; killed by SIGSEGV",
    ]
    assert sections(verdict)["[rank 0] stacks"].startswith("test_it.py:12 in test_it\n")
    assert verdict.sections == (("Captured stdout call [ranks 0-1]", OUTPUT[1]),)
    both = [passed(rank)._replace(later=terminated(rank, RankOutcome(2, "failed"))) for rank in range(2)]
    assert "when they were stopped 3 s after rank 2 failed" in summary(judged(*both, failed(2)))[1][1]
    assert judged(ended, passed(1)).outcome == "passed"  # The later phase fails.


def test_a_failure_raised_by_the_plugin_itself_has_no_place() -> None:
    plugin_error = text_longrepr("no marks", ["no marks"], (sentences.__file__, 3))
    report = reported(1, "failed", 1.0, ExceptionSketch("builtins", "RuntimeError", "no marks"), longrepr=plugin_error)
    assert summary(judged(failed(0, at=0.5), report))[1][1] == "rank 1: failed: no marks"


def test_ranks_without_a_report_fail_the_test() -> None:
    verdict = judged(passed(0), RankOutcome(1, "unstarted", text="Traceback\nLookupError: no such test\n"))
    assert verdict.cause == Cause(CauseKind.UNSTARTED, "", (1,))
    assert verdict.message == "rank 1 could not run the test: LookupError: no such test"
    assert judged(RankOutcome(0, "unstarted")).message.endswith("run the test: it sent no report of the call phase")
    copy_came_back = judged(passed(0), RankOutcome(1, "failed", text="a copy came back"))
    assert copy_came_back.cause == Cause(CauseKind.FAILED, "forked copy", (1,))
    assert copy_came_back.message == "rank 1 failed in the call phase: a copy came back"


def test_a_skip_on_some_ranks_fails_the_test() -> None:
    verdict = judged(skipped(0), passed(1), skipped(2), passed(3))
    assert verdict.message == "the ranks disagree in the call phase: ranks 0, 2 skipped, ranks 1, 3 ran"
    assert traceback_lines(verdict) == [
        verdict.message,
        "",
        "ranks 0, 2: skipped: no network",
        "ranks 1, 3: passed",
    ]


def test_a_skip_on_all_ranks_skips_the_test() -> None:
    verdict = judged(skipped(0), skipped(1, "no disk"))
    assert verdict == Verdict(
        "skipped",
        "no network",
        longrepr=("test_it.py", 5, "Skipped: no network"),
        ranks=(RankPhase(0, "skipped"), RankPhase(1, "skipped")),
    )


def test_a_test_xfails_only_if_it_does_on_all_ranks() -> None:
    expected = [skipped(rank, "a traceback", wasxfail="reason: known") for rank in range(2)]
    verdict = judged(*expected)
    assert (verdict.outcome, verdict.message, verdict.wasxfail) == ("xfailed", "reason: known", "reason: known")
    mixed = judged(expected[0], skipped(1))
    assert (mixed.outcome, mixed.message) == ("skipped", "no network")
    assert kind(expected[0], passed(1)) is CauseKind.DISAGREED
    assert judged(expected[0], failed(1)).message == "rank 1: assert 0 == 1"


def test_an_xpass_is_kept() -> None:
    verdict = judged(passed(0), passed(1, wasxfail="known"))
    assert (verdict.outcome, verdict.wasxfail) == ("passed", "known")


def test_an_unknown_outcome_fails_the_test() -> None:
    unknown: Any = "rerun"
    verdict = judged(passed(0), reported(1, unknown, 1.0, None, longrepr=None))
    assert (verdict.outcome, verdict.cause) == ("failed", Cause(CauseKind.DISAGREED, "subtest"))
    assert verdict.message == "the ranks disagree in the call phase: rank 0 ran, rank 1 rerun"


def test_captured_output_is_labelled_by_rank() -> None:
    out, other, log = ("Captured stdout call", "a\n"), ("Captured stdout call", "b\n"), ("Captured log call", "c\n")
    outcomes = [passed(0, sections=[out, log]), passed(1, sections=[other]), passed(2, sections=[out])]
    labelled = (
        ("Captured stdout call [ranks 0, 2]", "a\n"),
        ("Captured log call [rank 0]", "c\n"),
        ("Captured stdout call [rank 1]", "b\n"),
    )
    assert judged(*outcomes).sections == labelled
    assert judged(*outcomes, died(3)).sections == labelled
    assert judged(passed(0, sections=[out])).sections == (out,)
    assert judged(passed(0)._replace(later=died(0, sections=(log,)))).sections == (log,)


@pytest.mark.parametrize(
    ("longrepr", "message"),
    [
        ("one line", "rank 1: one line"),
        ("first\nsecond", "rank 1: first"),
        ("", "rank 1: failed"),
        (None, "rank 1: None"),
    ],
)
def test_a_failure_may_be_plain_text(longrepr: str | None, message: str) -> None:
    verdict = judged(passed(0), reported(1, "failed", 1.0, None, longrepr=longrepr))
    assert (verdict.message, verdict.cause) == (message, Cause(CauseKind.FAILED, "", (1,)))
    assert verdict.longrepr["reprcrash"]["path"] == "test_it.py"


def test_properties_are_labelled_by_rank_if_the_ranks_differ() -> None:
    def with_properties(rank: int, *pairs: tuple[str, object]) -> RankOutcome:
        return passed(rank, user_properties=list(pairs))

    assert properties(
        [
            with_properties(0, ("same", 1), ("same", 2), ("other", 3), ("alone", 5)),
            with_properties(1, ("same", 1), ("same", 2), ("other", 4)),
        ]
    ) == [("same", 1), ("same", 2), ("other[rank 0]", 3), ("other[rank 1]", 4), ("alone[rank 0]", 5)]
    assert properties([with_properties(0, ("mine", 1))]) == [("mine", 1)]
    assert properties([with_properties(0, ("mine", 1)), died(1)]) == [("mine[rank 0]", 1)]


def finished(*counts: Mapping[str, GroupUse]) -> dict[int, Finished]:
    return {rank: Finished(1, uses) for rank, uses in enumerate(counts)}


def at_the_end(*ends: Finished, **more: Any) -> Verdict:
    """Return the verdict on a teardown that has passed on all ranks, whose last messages are `ends`."""
    return judged(*map(passed, range(len(ends))), when="teardown", finished=dict(enumerate(ends)), **more)


def test_different_numbers_of_collectives_fail_the_teardown_and_end_the_world() -> None:
    verdict = at_the_end(*finished({"0": GroupUse((0, 1), 4)}, {"0": GroupUse((0, 1), 5)}).values())
    assert (verdict.outcome, verdict.cause) == ("failed", Cause(CauseKind.DISAGREED, "collectives"))
    assert verdict.message.startswith("the ranks issued different numbers of collectives")
    assert verdict.kill_reason == verdict.message


def test_different_numbers_of_groups_fail_the_test_that_has_made_them() -> None:
    verdict = at_the_end(Finished(1, {}, groups=2, groups_by_test=1), Finished(1, {}, groups=1))
    assert (verdict.outcome, verdict.cause) == ("failed", Cause(CauseKind.DISAGREED, "process groups"))
    assert verdict.kill_reason == verdict.message
    assert verdict.message.startswith("the ranks made different numbers of process groups: rank 0: 1, rank 1: 0; ")


def test_different_numbers_of_other_groups_end_the_world_without_a_failure() -> None:
    verdict = at_the_end(Finished(1, {}, groups=1), Finished(1, {}, groups=2))
    assert (verdict.outcome, verdict.kill_reason, verdict.retire) == ("passed", None, True)
    assert verdict.properties == ((REPLACED, sentences.OTHER_GROUPS),)
    assert not at_the_end(Finished(1, {}, groups=1), Finished(1, {}, groups=1)).retire


def test_an_error_in_a_late_fixture_teardown_fails_the_teardown() -> None:
    verdict = at_the_end(Finished(1, {}), Finished(1, {}, late_teardown_error="left by test_a:\nValueError: x"))
    assert (verdict.message, verdict.cause) == ("left by test_a:", Cause(CauseKind.FAILED, "late teardown"))
    assert verdict.longrepr["reprtraceback"]["reprentries"][0]["data"]["lines"][1:] == ["ValueError: x\n"]
    counts = finished({"0": GroupUse((0, 1), 4)}, {"0": GroupUse((0, 1), 5)})
    ends = [structs.replace(one, late_teardown_error="left by test_a:\nValueError: x") for one in counts.values()]
    assert at_the_end(*ends).cause == Cause(CauseKind.DISAGREED, "collectives")


@pytest.mark.parametrize(
    ("leaks", "outcome", "warnings"), [("off", "passed", 0), ("warn", "passed", 1), ("fail", "failed", 0)]
)
def test_a_leak_is_ignored_or_is_a_warning_or_a_failure(leaks: str, outcome: str, warnings: int) -> None:
    leak = Finished(1, {}, leaks=(THREAD,))
    verdict = at_the_end(leak, leak, leaks=leaks)
    assert (verdict.outcome, len(verdict.leak_warnings)) == (outcome, warnings)
    assert verdict.cause == (Cause(CauseKind.LEAKED, "thread", (0, 1)) if outcome == "failed" else None)
    text = "" if leaks == "off" else "ranks 0-1 left the thread 'mine' running"
    assert (*verdict.leak_warnings, verdict.message)[0] == text


def test_leaks_are_not_reported_in_addition_to_a_failure_but_errors_of_earlier_fixtures_are() -> None:
    bad = Finished(1, {}, leaks=(THREAD,))
    assert at_the_end(bad, failed_before=True).outcome == "passed"
    late = structs.replace(bad, late_teardown_error="an error")
    assert at_the_end(late, failed_before=True).message == "an error"
    verdict = judged(failed(0), when="teardown", finished={0: bad})
    assert verdict.message == "assert 0 == 1"


def test_the_end_of_a_rank_is_reported_with_a_failure_or_as_announced() -> None:
    died_later = passed(0)._replace(later=died(0))
    assert reported_ends(Verdict("failed"), [died_later, failed(1), died(2)]) == {0, 2}
    assert reported_ends(Verdict("skipped"), [died_later, skipped(1)]) == set()
    announced = died(1)._replace(expected=True), failed(2)._replace(expected=True, later=died(2))
    assert reported_ends(Verdict("passed"), [passed(0), *announced]) == {1}


def test_a_failure_after_the_end_of_the_only_other_rank_names_its_rank() -> None:
    verdict = judged(failed(1, sections=[OUTPUT]), when="teardown", key=world_key(2))
    assert verdict.message == "rank 1: assert 0 == 1"
    assert verdict.sections == ((f"{OUTPUT[0]} [rank 1]", OUTPUT[1]),)
    verdict = judged(hung(1), when="teardown", key=world_key(2))
    assert verdict.message == "timed out after 5 s: rank 1 is at test_it.py:12"


@pytest.mark.parametrize("when", ["call", "teardown"])
def test_failed_subtests_fail_their_phase(when: When) -> None:
    numbers = {"subtest": 2, "check": 1}
    verdict = judged(passed(0), passed(1), when=when, failed_subtests=numbers)
    assert verdict.cause == Cause(CauseKind.FAILED, "subtests")
    assert verdict.message == "contains 2 failed subtests and 1 failed check"
    assert judged(failed(0), when=when, failed_subtests=numbers).message == "assert 0 == 1"


def test_ranks_that_end_a_phase_differently_are_retired() -> None:
    assert judged(passed(0), failed(1)).retire
    assert not judged(failed(0), failed(1)).retire
    assert not judged(passed(0), failed(1), when="teardown").retire
    assert judged(passed(0), passed(1), failed_subtests={"subtest": 1}).retire


def test_the_verdict_has_the_slowest_time_and_the_data_of_all_ranks() -> None:
    report = PhaseReport(1, "call", {"outcome": "passed", "duration": 3.0}, plugin_data=dumps({"key": 1}))
    verdict = judged(passed(0, duration=1.0), RankOutcome(1, "passed", 1.0, report), died(2))
    assert (verdict.duration, verdict.rank_data) == (3.0, {1: {"key": 1}})


def test_a_phase_lasts_until_a_rank_that_did_not_report_has_ended() -> None:
    end = died(2, span=(1003.0, 1003.5))
    reported = passed(1, duration=3.0, start=1000.0, stop=1003.0)
    verdict = judged(passed(0, duration=2.0), reported._replace(later=end), died(2, span=(1000.0, 1002.5)))
    assert verdict.duration == 3.5
    assert [(rank.start, rank.stop) for rank in verdict.ranks[1:]] == [(1000.0, 1003.5), (1000.0, 1002.5)]
    assert judged(passed(0, duration=2.0), died(1, span=(1000.0, 1004.0))).duration == 4.0
    ends = [Finished(1, {}, properties={"peak": rank}) for rank in range(2)]
    assert at_the_end(*ends).properties == (("peak[rank 0]", 0), ("peak[rank 1]", 1))
    assert at_the_end(ends[0]).properties == (("peak", 0),)
