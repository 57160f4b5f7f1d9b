"""Functions that compare the records of ranks: they find the collectives in which ranks wait, and deadlocks.

Ranks are in a deadlock if they wait for each other, or for a rank that has finished the test, and can never go on.
The rule is strict, because a healthy test must not fail: a test is in a deadlock if each rank that has not finished it
waits for an operation that cannot complete, and no thread of any rank goes on by itself before the test's own timeout.
An operation cannot complete if a rank that must take part has issued too few of its kind, or another collective under
the same number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from pytest_accel.messages.flight_record import Collective, FlightRecord, RankWait
from pytest_accel.messages.rank_messages import GroupUse

OF_ONE_SHAPE = frozenset(
    ("all_reduce", "reduce", "_reduce_oop", "broadcast", "_broadcast_oop", "_all_gather_base", "_reduce_scatter_base")
)
"""Operations whose input must have the same shape on every rank.

Other operations allow different shapes, or take an input from one rank only.
"""


def waiting_in(record: FlightRecord | None) -> Collective | None:
    """Return the collective in which the rank of this `record` waits; None if it waits in none, or has no record."""
    groups = {} if record is None else record.collectives
    last = [groups[name][max(groups[name])] for name in sorted(groups)]
    return next((one for one in last if not one.done), None)


@dataclass(frozen=True, slots=True)
class GroupWait:
    """The wait of ranks in a collective of a group."""

    group: str
    different: Mapping[int, Collective]
    """The call of each rank with the first number for which the calls are `unlike`; empty if all calls are alike."""
    inside: Mapping[Collective, list[int]]
    """The ranks that wait for all others, by the collective they are in; usually all are in the same collective."""
    missing: Mapping[int, Collective | None]
    """The members that have not reached the collective, with the last collective of each."""
    unknown: list[int]
    """The members without a record, such as dead ranks."""


def waits(records: Mapping[int, FlightRecord]) -> list[GroupWait]:
    """Return the wait in each group in which a rank waits.

    If the members of a group are unknown, they are assumed to be the ranks that have entered a collective of it.
    """
    found = []
    for group in sorted({group for record in records.values() for group in record.collectives}):
        entered = {rank: one.collectives[group] for rank, one in records.items() if group in one.collectives}
        last = {rank: calls[max(calls)] for rank, calls in entered.items()}
        waiting = {rank: one for rank, one in last.items() if not one.done}
        if not waiting:
            continue
        # In the collective with the highest number, a rank waits for all others.
        number = max(one.number for one in waiting.values())
        inside: dict[Collective, list[int]] = {}
        for rank, one in waiting.items():
            if one.number == number:
                inside.setdefault(one, []).append(rank)
        members = next((use.members for rank in last if (use := records[rank].uses.get(group))), tuple(last))
        behind = [rank for rank in members if rank in records and (rank not in last or last[rank].number < number)]
        missing = {rank: last.get(rank) for rank in behind}
        unknown = [rank for rank in members if rank not in records]
        found.append(GroupWait(group, _different(entered), inside, missing, unknown))
    return found


def _different(entered: Mapping[int, Mapping[int, Collective]]) -> dict[int, Collective]:
    """Return the call of each rank with the first number for which the calls are `unlike`; empty if all are alike."""
    for number in sorted({number for found in entered.values() for number in found}):
        ones = {rank: found[number] for rank, found in sorted(entered.items()) if number in found}
        if unlike(ones.values()):
            return ones
    return {}


def unlike(calls: Collection[Collective]) -> tuple[str, ...]:
    """Return what differs in `calls` of one number, and must not: ``operations``, or ``shapes`` and ``types``."""
    operations = {one.operation for one in calls}
    if len(operations) > 1:
        return ("operations",)
    # Another shape of the same size is accepted. Some operations, such as scatter, have an input on one rank only.
    sizes = {tuple(map(prod, one.shapes)) for one in calls if one.operation in OF_ONE_SHAPE}
    types = {one.types for one in calls if one.types}
    return tuple(name for name, values in (("shapes", sizes), ("types", types)) if len(values) > 1)


def deadlocked(records: Mapping[int, FlightRecord], unfinished: Iterable[int], rest: float) -> dict[int, RankWait]:
    """Return the wait of each of the `unfinished` ranks if no rank can go on, else an empty dict.

    `records` are the records of all ranks. The test's own timeout ends in `rest` seconds.
    """
    found: dict[int, RankWait] = {}
    for rank in unfinished:
        wait = records[rank].wait
        if wait is None or not (lacking(rank, records) or _is_uneven(wait, records)):
            return {}
        found[rank] = wait
    # A thread goes on if torch's own timeout ends its operation before: the test may expect this error.
    return found if all(record.quiet > rest for record in records.values()) else {}


def lacking(rank: int, records: Mapping[int, FlightRecord]) -> dict[int, int]:
    """Return the ranks that have issued too few operations for the wait of `rank` to end, each with their number.

    Return an empty dict if the wait may end, or if that is unknown.
    """
    own = records[rank]
    if (wait := own.wait) is None or not records.keys() >= {*wait.peers}:
        return {}
    issued = {}
    for peer in wait.peers:
        if wait.kind == "exchange":
            issued[peer] = records[peer].exchanges.get(wait.group, 0)
            continue
        use = records[peer].uses.get(wait.group)
        # The peer may have destroyed the group, and made another group of its name.
        if use is None or use.members != own.uses[wait.group].members:
            return {}
        issued[peer] = _number(wait, use)
    if wait.kind == "receive":
        return issued if sum(issued.values()) < wait.number else {}
    return {peer: number for peer, number in issued.items() if number < wait.number}


def _number(wait: RankWait, use: GroupUse) -> int:
    """Return the number of operations in `use` that `wait` is about."""
    if wait.kind == "collective":
        return use.collectives or 0
    return sum(number for channel, number in use.messages if channel in wait.channels)


def _is_uneven(wait: RankWait, records: Mapping[int, FlightRecord]) -> bool:
    """Return whether ranks have called collectives under the number of `wait` that cannot complete together."""
    if wait.kind != "collective":
        return False
    called = [records[peer].collectives.get(wait.group, {}).get(wait.number) for peer in wait.peers]
    return not {"operations", "shapes"}.isdisjoint(unlike([one for one in called if one is not None]))
