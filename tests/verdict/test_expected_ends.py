"""Tests of announced ends: which outcomes they cover, and that they cover nothing else."""

from __future__ import annotations

import signal

import pytest

from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.diagnostics.rank_state import Grace, Hang, HangCause, RankOutcome, RankState
from pytest_accel.messages.rank_messages import (
    UNEVEN_COLLECTIVES,
    Announced,
    ExceptionSketch,
    ExitCause,
    ExpectedEnd,
    Finished,
    GroupUse,
    Leak,
    LeakKind,
    PhaseReport,
    RankExit,
    UnawaitedCollective,
    When,
)
from pytest_accel.verdict.causes import Cause, CauseKind
from pytest_accel.verdict.expected_ends import announced_hang
from pytest_accel.verdict.phase_verdict import Verdict
from tests.verdict.phases import failed, hung, judged, passed, skipped, summary, terminated, world_key

EXIT = ExpectedEnd(1, status=7)
KILLED = ExpectedEnd(1, status=-signal.SIGKILL)
HANG = ExpectedEnd(1, after=2.0)
DEVICE = ExpectedEnd(1, text="assert triggered")
UNEVEN = UNEVEN_COLLECTIVES


def ended(status: int | None, rank: int = 1, cause: ExitCause = ExitCause.EXITED) -> RankOutcome:
    return RankOutcome(rank, "died", 1.0, exit=RankExit(cause, status))


def device_error(text: str = "CUDA error: device-side assert triggered") -> RankOutcome:
    outcome = failed(1, text)
    assert outcome.report is not None
    sent = outcome.report
    exception = ExceptionSketch("torch", "AcceleratorError", text, of_device=True)
    return outcome._replace(report=PhaseReport(1, "call", sent.report, sent.at, exception))


STOPPED = RankOutcome(1, "hung", 9.0, hang=Hang(HangCause.OTHER_RANK, 2.0, event=RankOutcome(0, "passed")))
OUTCOMES = {
    "passes": passed(1),
    "skips": skipped(1),
    "calls pytest.xfail": skipped(1, wasxfail="reason: by hand"),
    "fails": failed(1),
    "raises SystemExit": failed(1, "7"),
    "comes back from a fork": RankOutcome(1, "failed", 1.0, text="a copy came back"),
    "exits with 0": ended(0),
    "exits with 7": ended(7),
    "exits with 8": ended(8),
    "is killed": ended(-signal.SIGKILL),
    "is killed by SIGSEGV": ended(-signal.SIGSEGV),
    "is killed by SIGABRT": ended(-signal.SIGABRT),
    "is killed by SIGTERM": ended(-signal.SIGTERM),
    "is killed for its memory": ended(-signal.SIGKILL, cause=ExitCause.OUT_OF_MEMORY),
    "is killed with its server": ended(None, cause=ExitCause.SERVER_ENDED),
    "is killed with its job": ended(-signal.SIGKILL, cause=ExitCause.JOB_ENDED),
    "is lost": ended(None, cause=ExitCause.MACHINE_LOST),
    "ends unknown": RankOutcome(1, "died", 1.0),
    "calls pytest.exit": RankOutcome(1, "died", 1.0, text="asked for the end of the session"),
    "hangs": STOPPED,
    "times out": hung(1),
    "is in a deadlock": hung(1)._replace(hang=Hang(HangCause.DEADLOCK, 0.0, "call")),
    "is stopped": terminated(1, RankOutcome(0, "failed")),
    "has a device error": device_error(),
    "has another device error": device_error("CUDA error: out of memory"),
    "cannot run": RankOutcome(1, "unstarted"),
    "has an outcome of a plugin": passed(1)._replace(ending="expected"),  # type: ignore[arg-type]
}
"""The rows of the verdict matrix (`tests/faults/test_verdict_matrix.py`), and those that a session can hardly show."""
FITTING = {
    EXIT: "exits with 7",
    KILLED: "is killed",
    HANG: "hangs",
    DEVICE: "has a device error",
    UNEVEN: "passes",
}
"""The outcome of the call that is as announced. Numbers of collectives are compared after the teardown."""
ENDS_OF_RANKS = [end for end in FITTING if end is not UNEVEN]


def by_rank(*ends: tuple[ExpectedEnd, ...]) -> list[Announced]:
    """Return what the ranks have announced, the `ends` of each."""
    return [Announced(1, one) for one in ends]


def announced(*outcomes: RankOutcome, ends: tuple[ExpectedEnd, ...]) -> Verdict:
    """Return the verdict on the call if all ranks have announced `ends`."""
    return judged(*outcomes, announced=[Announced(1, ends)] * len(outcomes))


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("end", FITTING)
def test_only_the_announced_end_counts_as_passed(end: ExpectedEnd, name: str) -> None:
    outcomes = [passed(0), OUTCOMES[name]]
    verdict = announced(*outcomes, ends=(end,))
    assert (verdict.outcome == "passed") == (FITTING[end] == name)
    # The message about a rank that was stopped is about what has stopped it.
    if verdict.outcome == "failed" and name not in ("is stopped", "hangs") and end is not UNEVEN:
        assert "announced: rank 1 " in verdict.message
    survivor = OUTCOMES[name]._replace(rank=0)
    verdict = announced(survivor, OUTCOMES[FITTING[end]], ends=(end,))
    assert (verdict.outcome == "passed") == (name == "passes"), "an outcome of the other rank"
    verdict = announced(survivor, OUTCOMES[name], ends=(end,))
    assert (verdict.outcome == "passed") == (FITTING[end] == name == "passes"), "an outcome of both ranks"


@pytest.mark.parametrize("end", ENDS_OF_RANKS)
def test_an_announcement_counts_only_if_all_ranks_have_made_the_same(end: ExpectedEnd) -> None:
    outcomes = [passed(0), OUTCOMES[FITTING[end]], passed(2)]
    for ends in (
        [(), (end,), (end,)],
        [(end,), (), (end,)],
        [(end,), (end,), ()],
        [(end,), (end, UNEVEN), (end,)],
        [(end,)],
        [(end,), (ExpectedEnd(1, status=3),), (end,)],
    ):
        verdict = judged(*outcomes, announced=by_rank(*ends))
        assert verdict.outcome == "failed"
        assert len(ends) == 1 or "the ranks must announce the same ends, " in verdict.message
    every = [passed(0), passed(1), passed(2)]
    assert judged(*every, announced=by_rank((UNEVEN,), (), ())).outcome == "failed"


@pytest.mark.parametrize("when", ["setup", "teardown"])
@pytest.mark.parametrize("end", ENDS_OF_RANKS)
def test_announcements_change_no_verdict_on_another_phase_than_the_call(end: ExpectedEnd, when: When) -> None:
    for name, outcome in OUTCOMES.items():
        strict = judged(passed(0), outcome, when=when)
        verdict = judged(passed(0), outcome, when=when, announced=by_rank((end,), (end,)))
        assert (verdict.outcome, verdict.message) == (strict.outcome, strict.message)
        assert (verdict.outcome == "passed") == (name == "passes")


def test_the_announcement_of_all_ends_is_a_failure() -> None:
    ends = (ExpectedEnd(0, status=7), EXIT)
    verdict = announced(ended(7, 0), ended(7), ends=ends)
    text = "announced: rank 0 exits with status 7, rank 1 exits with status 7"
    assert verdict.message == (
        "ranks 0-1 exited with status 7; the ranks must announce the same ends, and leave a rank to report: "
        f"rank 0 {text}; rank 1 {text}"
    )
    assert announced(ended(7, 0), ends=ends[:1]).outcome == "failed"
    hangs = (ExpectedEnd(0, status=7), HANG)
    assert announced(ended(7, 0), STOPPED, ends=hangs).outcome == "failed"


def test_two_ends_of_one_rank_or_ends_of_no_rank_are_a_failure() -> None:
    assert announced(passed(0), ended(7), ends=(EXIT, KILLED)).outcome == "failed"
    assert announced(passed(0), ended(7), ends=(EXIT, EXIT)).outcome == "failed"
    verdict = announced(passed(0), passed(1), ends=(ExpectedEnd(9, status=7),))
    assert verdict.message == "the test passed; announced: rank 9 exits with status 7"


def test_the_message_of_a_failure_says_what_was_announced_and_what_came() -> None:
    verdict = announced(passed(0), ended(8), ends=(EXIT,))
    assert verdict.message == "rank 1 exited with status 8; announced: rank 1 exits with status 7"
    assert verdict.longrepr["reprcrash"]["message"] == verdict.message
    assert verdict.cause == Cause(CauseKind.DIED, "status 8", (1,))
    verdict = announced(passed(0), passed(1), ends=(KILLED,))
    assert verdict.message == "the test passed; announced: rank 1 is killed by SIGKILL"
    assert verdict.cause == Cause(CauseKind.FAILED, "announced end", (1,))
    verdict = announced(passed(0), skipped(1), ends=(HANG,))
    assert verdict.message.endswith("; announced: rank 1 hangs for 2 s")
    verdict = announced(skipped(0), skipped(1), ends=(DEVICE,))
    assert verdict.outcome == "failed"
    assert verdict.message.endswith("rank 1 fails with an error of its device with the text 'assert triggered'")


def test_a_survivor_is_judged_as_always() -> None:
    verdict = announced(failed(0), ended(7), passed(2), ends=(EXIT,))
    assert verdict.message == "rank 0: assert 0 == 1"
    assert summary(verdict)[1] == [
        "rank 0: failed at test_it.py:7",
        "rank 1: exited with status 7, as announced",
        "rank 2: passed",
    ]
    for other in (ended(7, 2), hung(2), skipped(2), RankOutcome(2, "unstarted")):
        assert announced(passed(0), ended(7), other, ends=(EXIT,)).outcome == "failed"
    verdict = announced(passed(0), ended(7), ended(7, 2), ends=(EXIT,))
    assert verdict.cause == Cause(CauseKind.DIED, "status 7", (2,))
    assert announced(skipped(0), ended(7), ends=(EXIT,)).outcome == "failed", "some skipped, and some ran"


def test_an_announced_end_is_reported_with_the_call_only() -> None:
    verdict = announced(passed(0), ended(7), STOPPED._replace(rank=2), passed(3), ends=(EXIT, HANG))
    assert verdict.outcome == "failed", "rank 2 was not announced"
    verdict = announced(passed(0), ended(7), ends=(EXIT,))
    assert (verdict.outcome, verdict.retire) == ("passed", True)
    subtest = judged(passed(0), ended(7), announced=by_rank((EXIT,), (EXIT,)), failed_subtests={"subtest": 1})
    assert subtest.outcome == "failed"
    later = judged(passed(0), when="teardown", announced=by_rank((EXIT,), (EXIT,)), key=world_key(2))
    assert later.outcome == "passed"
    assert announced(passed(0), device_error(), ends=(DEVICE,)).outcome == "passed"
    assert announced(device_error(), ends=(ExpectedEnd(1, text=""),)).outcome == "passed"


def test_uneven_collectives_are_announced_for_the_end_of_the_test() -> None:
    def end_of_test(*numbers: int, **more: object) -> Verdict:
        finished = {
            rank: Finished(1, {DEFAULT_GROUP: GroupUse((0, 1), number)}, **more)  # type: ignore[arg-type]
            for rank, number in enumerate(numbers)
        }
        announced = by_rank((UNEVEN,), (UNEVEN,))
        return judged(passed(0), passed(1), when="teardown", finished=finished, announced=announced)

    assert announced(passed(0), passed(1), ends=(UNEVEN,)).outcome == "passed"
    verdict = end_of_test(1, 2)
    assert verdict.outcome == "passed"
    assert verdict.kill_reason is not None, "the ranks are replaced"
    verdict = end_of_test(2, 2)
    assert verdict.message == "the test passed; announced: the ranks issue different numbers of collectives"
    verdict = end_of_test(1, 2, late_teardown_error="late")
    assert (verdict.outcome, verdict.message) == ("failed", "late")
    finished = {rank: Finished(1, {DEFAULT_GROUP: GroupUse((0, 1), rank)}) for rank in (0, 1)}
    half = judged(passed(0), passed(1), when="teardown", finished=finished, announced=by_rank((UNEVEN,), ()))
    assert half.outcome == "failed"


@pytest.mark.parametrize("end", [EXIT, HANG, UNEVEN])
def test_collectives_are_not_compared_after_an_announced_end(end: ExpectedEnd) -> None:
    def end_of_test(*announced: tuple[ExpectedEnd, ...], **more: object) -> Verdict:
        finished = {
            rank: Finished(1, {"3": GroupUse((0, 2), rank)}, **more)  # type: ignore[arg-type]
            for rank in (0, 2)
        }
        return judged(
            passed(0), passed(2), when="teardown", finished=finished, announced=by_rank(*announced), key=world_key(3)
        )

    unawaited = UnawaitedCollective("all_reduce", "test_it.py", 7, "Connection reset by peer")
    assert end_of_test((end,), (end,), (end,), unawaited=(unawaited,)).outcome == "passed"
    assert end_of_test((end,), (), (end,)).cause == Cause(CauseKind.DISAGREED, "collectives")
    leak = Leak(LeakKind.THREAD, "mine")
    assert end_of_test((end,), (end,), (end,), leaks=(leak,)).cause == Cause(CauseKind.LEAKED, "thread", (0, 2))


def test_the_ranks_are_replaced_after_a_test_with_announcements() -> None:
    both = (ExpectedEnd(0, text=""), ExpectedEnd(1, text=""))
    verdict = announced(device_error()._replace(rank=0), device_error(), ends=both)
    assert (verdict.outcome, verdict.retire) == ("passed", True), "although their outcomes are equal"


def test_a_planned_fault_must_come() -> None:
    faults = ("delay before barrier (never called)",)
    text = "planned faults have not come in the test's own thread: rank 1: delay before barrier (never called)"
    for outcome, ends in ((passed(1), ()), (ended(7), (EXIT,)), (STOPPED, (HANG,)), (device_error(), (DEVICE,))):
        assert announced(passed(0), outcome, ends=ends).outcome == "passed"
        verdict = judged(passed(0), outcome, announced=[Announced(1, ends), Announced(1, ends, faults)])
        assert verdict.message == f"the test passed; {text}"
        assert verdict.cause == Cause(CauseKind.FAILED, "planned fault", (1,))
    verdict = judged(passed(0), passed(1), announced=[Announced(1, (EXIT,)), Announced(1, (EXIT,), faults)])
    assert verdict.message == f"the test passed; {text}; announced: rank 1 exits with status 7"
    missing = [Announced(), Announced(1, (), faults)]
    assert judged(passed(0), failed(1), announced=missing).message == "rank 1: assert 0 == 1"
    assert judged(skipped(0), skipped(1), announced=missing).outcome == "skipped"


def test_only_announced_ranks_may_hang() -> None:
    def hang(pending: set[int], *ends: ExpectedEnd) -> Grace | None:
        ranks = [RankState(rank=rank) for rank in range(4)]
        for state in ranks:
            state.reports["setup"] = PhaseReport(1, "setup", {"outcome": "passed"}, 1.0)
            if state.rank not in pending:
                state.reports["call"] = PhaseReport(1, "call", {"outcome": "passed"}, 10.0 + state.rank)
        return announced_hang(ranks, [Announced(1, ends)] * 4)

    other = ExpectedEnd(2, after=5.0)
    last = RankOutcome(3, "passed", 13.0)
    assert hang({1}, HANG, other) == (15.0, Hang(HangCause.OTHER_RANK, 2.0, event=last))
    assert hang({1, 2}, HANG, other) == (18.0, Hang(HangCause.OTHER_RANK, 5.0, event=last))
    for grace in (hang({1, 3}, HANG, other), hang(set(), HANG), hang({1}, EXIT), hang({1})):
        assert grace is None
