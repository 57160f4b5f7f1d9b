"""The ends of ranks that a test has announced. Pure functions.

An end counts as announced only if every rank has announced the same ends, also the rank that ends so. A rank sends its
announcements before its end, over the same connection: an announcement that arrives after the event is not accepted.
Whatever differs from the announcements in any way is judged as if there were none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pytest_accel.core.rank_exit import exited
from pytest_accel.core.rank_messages import EndKind, ExpectedEnd
from pytest_accel.diagnostics.rank_state import HangCause, RankOutcome

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


def marked(outcomes: Sequence[RankOutcome], announced: Sequence[Sequence[ExpectedEnd]]) -> list[RankOutcome]:
    """Return the `outcomes` of the call, one of each rank, with those marked that all ranks have `announced`."""
    ends = agreed(announced) if len(announced) == len(outcomes) else ()
    return [outcome._replace(expected=is_expected(outcome, ends)) for outcome in outcomes]


def unfulfilled(outcomes: Sequence[RankOutcome], ends: Sequence[ExpectedEnd]) -> list[ExpectedEnd]:
    """Return those of `ends` that are about one rank and have not come. `outcomes` are those of `marked`."""
    expected = {outcome.rank for outcome in outcomes if outcome.expected}
    return [end for end in ends if end.kind is not EndKind.UNEVEN_COLLECTIVES and end.rank not in expected]


def hang_time(pending: Collection[int], ends: Sequence[ExpectedEnd]) -> float | None:
    """Return how long the ranks `pending`, which alone have not finished, must go on to hang as announced.

    Return None if a rank among them is to end in another way.
    """
    times = {end.rank: end.after for end in ends if end.kind is EndKind.HANG}
    return max(times[rank] for rank in pending) if pending and times.keys() >= set(pending) else None
