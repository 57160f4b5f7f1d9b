"""Recognition of ranks that wait for each other, or for a rank that has finished the test, and can never go on.

The functions are pure. Their input is the records of torch's flight recorder, with what the rank adds to them.

The rule is strict, because a healthy test must not fail: a test is in a deadlock if each rank that has not finished it
stands in a collective that cannot complete. A collective cannot complete if a member of its group has not reached it,
or has called another operation, or has passed an input of another size, under the same number. No member will do more:
each has finished the test, or stands in such a collective itself. So the rule judges only groups whose numbers of
collectives can be compared, and ranks in which no other thread can issue a collective (`rank.group_state`). It judges
no collective that torch's own timeout would end earlier than the plugin's: the test may expect this error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json import loads
from math import prod

from pytest_accel.diagnostics.collectives import OF_ONE_SHAPE, Collective, Record, read_record


@dataclass(frozen=True, slots=True)
class Position:
    """The collective in which a rank stands, and the collectives that it has issued."""

    record: Record
    members: Mapping[str, tuple[int, ...]]
    """The ranks of each group of the rank."""
    issued: Mapping[str, int]
    """Number of collectives that the rank has issued in each group that can be judged."""
    awaited: Collective | None = None
    """The collective in which the rank stands; None if it stands in none, or this is not certain."""
    left: float = 0.0
    """Seconds after which torch ends the wait for `awaited`."""


def read_position(record: bytes) -> Position | None:
    """Return the position in a rank's `record`; None if the record is not valid or has none."""
    collectives = read_record(record)
    try:
        data = loads(record)
        issued = {str(group): int(number) for group, number in data["issued"].items()}
        members = {str(group): tuple(map(int, ranks)) for group, ranks in data["members"].items()}
        group, now = data["waits_in"], float(data["now"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    last = collectives.get(group, {}).get(issued.get(group, 0))
    if last is None or last.done or last.ends is None:
        return Position(collectives, members, issued)
    return Position(collectives, members, issued, last, last.ends - now)


def deadlocked(positions: Mapping[int, Position], unfinished: Iterable[int], rest: float) -> dict[int, Collective]:
    """Return the collective in which each of the `unfinished` ranks stands, if none can go on; else nothing.

    `positions` are those of all ranks that have one. The test's own timeout is over in `rest` seconds.
    """
    found: dict[int, Collective] = {}
    for rank in unfinished:
        position = positions.get(rank)
        if position is None or position.awaited is None or position.left <= rest:
            return {}
        if _may_complete(position.awaited, positions):
            return {}
        found[rank] = position.awaited
    return found


def _may_complete(one: Collective, positions: Mapping[int, Position]) -> bool:
    """Return False if it is certain that a member of the group has not issued `one`, or has issued another one."""
    certain = False
    for member in one.members:
        position = positions.get(member)
        if position is None or position.members.get(one.group) != one.members or one.group not in position.issued:
            return True  # For example, the member has destroyed the group and made another one of this name.
        if position.issued[one.group] < one.number:
            certain = True
        else:  # torch's record, a ring buffer, may have no entry of it any more.
            its = position.record.get(one.group, {}).get(one.number)
            certain = certain or (its is not None and _differ(its, one))
    return not certain


def _differ(one: Collective, other: Collective) -> bool:
    """Return whether two ranks' calls cannot complete together. gloo accepts another shape of the same size."""
    return one.operation != other.operation or (
        one.operation in OF_ONE_SHAPE and [*map(prod, one.shapes)] != [*map(prod, other.shapes)]
    )
