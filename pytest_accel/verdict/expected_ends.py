"""The ends of ranks that a test has announced. Pure functions.

An end counts as announced only if every rank has announced the same ends, also the rank that ends so. A rank sends its
announcements before its end, over the same connection: an announcement that arrives after the event is not accepted.
An end that differs from the announcements is judged as if there were none.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_accel.diagnostics.rank_state import Grace, Hang, HangCause, RankOutcome, RankState
from pytest_accel.messages.rank_messages import Announced, ExpectedEnd, exited


def agreed(announced: Sequence[Announced]) -> tuple[ExpectedEnd, ...]:
    """Return the ends that all ranks have `announced`; nothing if the ranks differ.

    Return nothing, too, if no rank would be left to report: then no outcome of the test is known.
    """
    ends = announced[0].ends if announced else ()
    if not ends or any(one.ends != ends for one in announced):
        return ()
    return () if leave_nobody(ends, len(announced)) else ends


def leave_nobody(ends: Sequence[ExpectedEnd], size: int) -> bool:
    """Return whether none of `size` ranks would be left to report if the test ended so."""
    return {end.rank for end in ends if end.text is None} >= set(range(size))


def is_expected(outcome: RankOutcome, ends: Sequence[ExpectedEnd]) -> bool:
    """Return whether `ends` has exactly one end for the rank of `outcome`, and the call has ended like that."""
    own = [end for end in ends if end.rank == outcome.rank]
    if len(own) != 1:
        return False
    end, hang = own[0], outcome.hang
    error = None if outcome.report is None else outcome.report.exception
    if end.status is not None:
        return outcome.ending == "died" and outcome.exit == exited(end.status)
    if end.after is not None:
        return hang is not None and hang.event is not None and hang.event.ending == "passed"
    if end.text is None or error is None:
        return False
    return outcome.ending == "failed" and error.of_device and end.text in error.text


def marked(outcomes: Sequence[RankOutcome], announced: Sequence[Announced]) -> Sequence[RankOutcome]:
    """Return the `outcomes` of the call. Mark those as expected that all ranks have announced."""
    ends = agreed(announced) if len(announced) == len(outcomes) else ()
    return [one._replace(expected=is_expected(one, ends)) for one in outcomes] if ends else outcomes


def announced_hang(ranks: Sequence[RankState], announced: Sequence[Announced]) -> Grace | None:
    """Return the time after which the ranks that have not finished the call have hung as all ranks have `announced`.

    Return None if a rank among them is to end in another way.
    """
    times = {end.rank: end.after for end in agreed(announced) if end.after is not None}
    if not times:
        return None
    pending = {rank.rank for rank in ranks if not rank.settled("call")}
    if not pending or not times.keys() >= pending:
        return None
    at, last = max((rank.outcome("call").at, rank.rank) for rank in ranks if rank.rank not in pending)
    seconds = max(times[rank] for rank in pending)
    return at + seconds, Hang(HangCause.OTHER_RANK, seconds, event=RankOutcome(last, "passed", at))
