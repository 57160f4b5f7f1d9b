"""The collectives of ranks, read from the records of torch's flight recorder, and deadlocks. Pure functions.

Ranks are in a deadlock if they wait for each other, or for a rank that has finished the test, and can never go on.
The rule is strict, because a healthy test must not fail: a test is in a deadlock if each rank that has not finished it
waits for an operation that cannot complete, and no thread of any rank goes on by itself before the test's own timeout.
An operation cannot complete if a rank that must take part has issued too few of its kind, or another collective under
the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from pytest_accel.core.truncation import recorded_group
from pytest_accel.messages.flight_record import COLLECTIVES, FlightRecord, RankWait
from pytest_accel.messages.struct_messages import decode

_TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
"""Name of a `torch.dtype` by c10's name of the type."""

OF_ONE_SHAPE = frozenset(
    ("all_reduce", "reduce", "_reduce_oop", "broadcast", "_broadcast_oop", "_all_gather_base", "_reduce_scatter_base")
)
"""Operations whose input must have the same shape on every rank.

Other operations allow different shapes, or take an input from one rank only.
"""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank has entered in a group."""

    group: str
    """The group's name, or `DEFAULT_GROUP`."""
    number: int
    """The sequence number of the collective in its group, from 1."""
    operation: str
    """For example ``all_reduce``."""
    types: tuple[str, ...]
    """The types of the input tensors, for example ``float32``."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the input tensors."""
    done: bool
    members: tuple[int, ...] = ()
    """The ranks of the group; empty if unknown."""

    @property
    def tensors(self) -> str:
        """The types and shapes of the input tensors, such as ``float32[1024]``, separated by commas."""
        each = zip(self.types, self.shapes, strict=False)
        return ", ".join(f"{kind}[{', '.join(map(str, shape))}]" for kind, shape in each)

    @property
    def name(self) -> str:
        """The operation and its number, such as ``all_reduce #4``."""
        return f"{self.operation} #{self.number}"

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.tensors})' if self.tensors else ''}"


Record = Mapping[str, Mapping[int, Collective]]
"""The collectives of one rank, by group and number."""


def read_record(data: bytes) -> FlightRecord:
    """Return the record that a rank has written as `data`, or an empty record if `data` is not valid."""
    try:
        record: FlightRecord = decode(data, FlightRecord)
    except ValueError:
        return FlightRecord()
    return record


def collectives_in(record: FlightRecord) -> dict[str, dict[int, Collective]]:
    """Return the collectives in a rank's `record`, by group and number; empty if their entries are not valid."""
    found: dict[str, dict[int, Collective]] = {}
    try:
        for entry in record.entries:
            # With TORCH_DISTRIBUTED_DEBUG=DETAIL, entries of a group and of the helper that checks it have no name.
            if entry["is_p2p"] or not entry["process_group"][0]:
                continue
            one = _collective(entry, record.members)
            of_group = found.setdefault(one.group, {})
            if of_group and one.number < max(of_group):
                of_group.clear()  # The entries so far belong to an earlier group of this name.
            of_group[one.number] = one
        for group, issued in record.issued.items():
            if any(number > issued.get(COLLECTIVES, number) for number in found.get(group, ())):
                del found[group]  # The entries belong to an earlier group of this name.
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
        return {}
    return found


def waiting_in(record: Record) -> Collective | None:
    """Return the collective in which the rank of this `record` waits, or None if it waits in none."""
    last = [record[group][max(record[group])] for group in sorted(record) if record[group]]
    return next((one for one in last if not one.done), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """Collectives that the ranks called under one number of a group, although they cannot complete together."""

    group: str
    number: int
    what: tuple[str, ...]
    """``operations``, or ``shapes`` and ``types``."""
    calls: Mapping[int, Collective]
    """The collective that each rank has called, by rank."""


@dataclass(frozen=True, slots=True)
class GroupWait:
    """The wait of ranks in a collective of a group."""

    group: str
    difference: Difference | None
    """The first collective of the group in which the ranks differ."""
    inside: Mapping[Collective, list[int]]
    """The ranks that wait for all others, by the collective they are in; usually all are in the same collective."""
    missing: Mapping[int, Collective | None]
    """The members that have not reached the collective, with the last collective of each."""
    unknown: list[int]
    """The members without a record, such as dead ranks."""


def waits(records: Mapping[int, Record]) -> list[GroupWait]:
    """Return the wait in each group in which a rank waits.

    If the members of a group are unknown, they are assumed to be the ranks that have entered a collective of it.
    """
    found = []
    for group in sorted({group for record in records.values() for group in record}):
        entered = {rank: record[group] for rank, record in records.items() if record.get(group)}
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
        members = next((one.members for one in last.values() if one.members), tuple(last))
        behind = [rank for rank in members if rank in records and (rank not in last or last[rank].number < number)]
        missing = {rank: last.get(rank) for rank in behind}
        unknown = [rank for rank in members if rank not in records]
        found.append(GroupWait(group, _difference(group, entered), inside, missing, unknown))
    return found


def _difference(group: str, entered: Mapping[int, Mapping[int, Collective]]) -> Difference | None:
    """Return the first collective that the ranks called with different operations, shapes or types."""
    for number in sorted({number for found in entered.values() for number in found}):
        ones = {rank: found[number] for rank, found in sorted(entered.items()) if number in found}
        operations = {one.operation for one in ones.values()}
        if len(operations) > 1:
            return Difference(group, number, ("operations",), ones)
        (operation,) = operations
        differ = {
            "shapes": operation in OF_ONE_SHAPE and len({one.shapes for one in ones.values()}) > 1,
            # Some operations, such as scatter, have an input on one rank only.
            "types": len({one.types for one in ones.values() if one.types}) > 1,
        }
        if any(differ.values()):
            return Difference(group, number, tuple(name for name, one in differ.items() if one), ones)
    return None


def _collective(entry: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> Collective:
    group = recorded_group(entry)
    return Collective(
        group=group,
        number=int(entry["collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        types=tuple(_TYPES.get(kind, kind) for kind in entry["input_dtypes"]),
        shapes=tuple(tuple(map(int, shape)) for shape in entry["input_sizes"]),
        done=bool(entry["retired"]) or entry["state"] == "completed",
        members=tuple(int(rank) for rank in members.get(group, ())),
    )


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
