"""The ends of ranks that a test has announced. Pure functions.

An end counts as announced only if every rank has announced the same ends, also the rank that ends so. A rank sends its
announcements before its end, over the same connection: an announcement that arrives after the event is not accepted.
Whatever differs from the announcements in any way is judged as if there were none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from pytest_accel.core.rank_exit import exited
from pytest_accel.core.rank_messages import EndKind, ExceptionSketch, ExpectedEnd, Finished
from pytest_accel.diagnostics.rank_state import HangCause, RankOutcome
from pytest_accel.verdict.causes import error_consequence
from pytest_accel.verdict.mismatches import Unawaited

_SILENT = (EndKind.EXIT, EndKind.HANG)
"""The ends of ranks that do not report."""


def agreed(announced: Sequence[Sequence[ExpectedEnd]]) -> tuple[ExpectedEnd, ...]:
    """Return the ends that all ranks have `announced`, one sequence for each rank; nothing if the ranks differ.

    Return nothing, too, if no rank would be left to report: then no outcome of the test is known.
    """
    ends = tuple(announced[0]) if announced else ()
    if any(tuple(one) != ends for one in announced):
        return ()
    return () if leave_nobody(ends, len(announced)) else ends


def leave_nobody(ends: Sequence[ExpectedEnd], size: int) -> bool:
    """Return whether none of `size` ranks would be left to report if the test ended so."""
    return {end.rank for end in ends if end.kind in _SILENT} >= set(range(size))


def is_expected(outcome: RankOutcome, ends: Sequence[ExpectedEnd]) -> bool:
    """Return whether `outcome`, that of the call, is the one in `ends` for its rank. Two for one rank are none."""
    own = [end for end in ends if end.rank == outcome.rank]
    if len(own) != 1:
        return False
    match own[0].kind:
        case EndKind.EXIT:
            return outcome.ending == "died" and own[0].status is not None and outcome.exit == exited(own[0].status)
        case EndKind.HANG:
            return outcome.hang is not None and outcome.hang.cause is HangCause.EXPECTED
        case EndKind.DEVICE_ERROR:
            error = "" if outcome.report is None else outcome.report.device_error
            return outcome.ending == "failed" and bool(error) and own[0].text in error
    return False


def without_broken_groups(finished: Mapping[int, Finished], ends: Sequence[ExpectedEnd]) -> dict[int, Finished]:
    """Return the last messages of the ranks without the process groups that have a rank that was to end.

    The other ranks of such a group notice the end at different times. So their numbers of collectives and messages
    differ in any way.
    """
    gone = {end.rank for end in ends}
    return {
        rank: structs.replace(
            left, collectives={name: one for name, one in left.collectives.items() if gone.isdisjoint(one[0])}
        )
        for rank, left in finished.items()
    }


def without_consequences(waiting: Sequence[Unawaited], ends: Sequence[ExpectedEnd]) -> list[Unawaited]:
    """Return those collectives without a wait that have failed for another reason than the announced `ends`.

    torch starts collectives itself, as in the backward pass of a model, and no test can wait for them. If a rank ends,
    they lose it; if the ranks issue different numbers, some never complete.
    """
    is_any_gone = any(end.rank is not None for end in ends)
    return [
        one
        for one in waiting
        if one.error is not None
        and not (is_any_gone and error_consequence(ExceptionSketch("", "RuntimeError", one.error)))
    ]


def hang_time(pending: Collection[int], ends: Sequence[ExpectedEnd]) -> float | None:
    """Return how long the ranks `pending`, which alone have not finished, must go on to hang as announced.

    Return None if a rank among them is to end in another way.
    """
    times = {end.rank: end.after for end in ends if end.kind is EndKind.HANG}
    return max(times[rank] for rank in pending) if pending and times.keys() >= set(pending) else None
