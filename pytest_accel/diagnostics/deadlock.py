"""Recognition of ranks that wait for each other, or for a rank that has finished the test, and can never go on.

The functions are pure. Their input is the records of the ranks.

The rule is strict, because a healthy test must not fail: a test is in a deadlock if each rank that has not finished it
waits for an operation that cannot complete, and no thread of any rank goes on by itself before the test's own timeout.
An operation cannot complete if a rank that must take part has issued too few of its kind, or another collective under
the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from pytest_accel.diagnostics.collectives import OF_ONE_SHAPE, Collective, collectives_in
from pytest_accel.messages.flight_record import FlightRecord, RankWait


def deadlocked(records: Mapping[int, FlightRecord], unfinished: Iterable[int], rest: float) -> dict[int, RankWait]:
    """Return the wait of each of the `unfinished` ranks if no rank can go on, else an empty dict.

    `records` are the records of all ranks. The test's own timeout ends in `rest` seconds.
    """
    found: dict[int, RankWait] = {}
    for rank in unfinished:
        wait = records[rank].wait
        if wait is None or not (lacking(rank, records) or _differs(rank, wait, records)):
            return {}
        found[rank] = wait
    # A thread goes on if torch's own timeout ends its operation before: the test may expect this error.
    return found if all(record.quiet > rest for record in records.values()) else {}


def lacking(rank: int, records: Mapping[int, FlightRecord]) -> dict[int, int]:
    """Return the ranks that have issued too few operations for the wait of `rank` to end, each with their number.

    Return an empty dict if the wait may end, or if that is unknown.
    """
    own = records[rank]
    if (wait := own.wait) is None:
        return {}
    issued = {}
    for peer in wait.peers:
        # The peer may have destroyed the group, and made another group of its name.
        if peer not in records or records[peer].members.get(wait.group) != own.members.get(wait.group):
            return {}
        counts = records[peer].issued.get(wait.group, {})
        issued[peer] = sum(counts.get(counter, 0) for counter in wait.counters)
    if wait.kind == "receive":
        return issued if sum(issued.values()) < wait.number else {}
    return {peer: number for peer, number in issued.items() if number < wait.number}


def _differs(rank: int, wait: RankWait, records: Mapping[int, FlightRecord]) -> bool:
    """Return whether another rank has called another collective than `rank` under the same number."""
    if wait.kind != "collective":
        return False
    called = {peer: collectives_in(records[peer]).get(wait.group, {}).get(wait.number) for peer in wait.peers}
    own = called[rank]
    return own is not None and any(other is not None and _differ(own, other) for other in called.values())


def _differ(one: Collective, other: Collective) -> bool:
    """Return whether two ranks' calls cannot complete together. gloo accepts another shape of the same size."""
    return one.operation != other.operation or (
        one.operation in OF_ONE_SHAPE and [*map(prod, one.shapes)] != [*map(prod, other.shapes)]
    )
