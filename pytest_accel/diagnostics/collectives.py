"""Analysis of the ranks' collectives: those that a rank has not reached, and those that differ between ranks.

The functions are pure. Their input is the records of torch's flight recorder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import loads
from typing import Any

from pytest_accel.core.group_names import DEFAULT_GROUP, group_label, recorded_group
from pytest_accel.core.rank_names import ranks_text

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
    ends: float | None = field(default=None, compare=False)
    """Time at which torch ends the collective with an error, in seconds since the epoch; None if unknown."""

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


_HINT = "with --accel-debug, such a call raises an error on every rank"

Record = Mapping[str, Mapping[int, Collective]]
"""The collectives of one rank, by group and number."""


def read_record(record: bytes) -> dict[str, dict[int, Collective]]:
    """Return the collectives in a rank's `record`, by group and number; empty if the record is not valid."""
    try:
        data = loads(record)
        entries, members, numbers = data["entries"], data.get("members", {}), data.get("numbers", {})
        found: dict[str, dict[int, Collective]] = {}
        for entry in entries:
            # With TORCH_DISTRIBUTED_DEBUG=DETAIL, entries of a group and of the helper that checks it have no name.
            if entry["is_p2p"] or not entry["process_group"][0]:
                continue
            one = _collective(entry, members)
            of_group = found.setdefault(one.group, {})
            if of_group and one.number < max(of_group):
                of_group.clear()  # The entries so far belong to an earlier group of this name.
            of_group[one.number] = one
        for group, issued in numbers.items():
            if any(number > issued for number in found.get(group, ())):
                del found[group]  # The entries belong to an earlier group of this name.
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
        return {}
    return found


def differences(records: Mapping[int, Record]) -> list[str]:
    """Return a text for each group in which a rank waits and ranks called different collectives under one number."""
    texts: list[str] = []
    for group in sorted({group for record in records.values() for group in record}):
        entered = {rank: record[group] for rank, record in records.items() if record.get(group)}
        if any(not found[max(found)].done for found in entered.values()):
            texts += _difference(entered, _of_group(group))[:1]
    return texts


def has_finished(record: bytes) -> bool:
    """Return whether the rank had finished its test when it wrote its `record`."""
    try:
        return bool(loads(record).get("finished"))
    except (ValueError, AttributeError):
        return False


def place_in(record: bytes) -> str:
    """Return the place in the code at which the rank wrote its `record`; empty if unknown."""
    try:
        return str(loads(record).get("place", ""))
    except (ValueError, AttributeError):
        return ""


def unrecorded_by(record: bytes) -> str:
    """Return the version of torch if it is too old to record collectives for this `record` of a rank; else nothing."""
    try:
        return str(loads(record).get("unrecorded_by", ""))
    except (ValueError, AttributeError):
        return ""


def waiting_in(record: Record) -> Collective | None:
    """Return the collective in which the rank of this `record` waits; None if it waits in none."""
    last = [record[group][max(record[group])] for group in sorted(record) if record[group]]
    return next((one for one in last if not one.done), None)


def describe_waits(records: Mapping[int, Record], places: Mapping[int, str]) -> list[str]:
    """Return lines that describe each group in which a rank waits. `places` has the ranks' known places in the code.

    If the members of a group are unknown, they are assumed to be the ranks that have entered a collective of it. The
    lines say "unknown" about a rank without a record, such as a dead one.
    """
    lines: list[str] = []
    for group in sorted({group for record in records.values() for group in record}):
        entered = {rank: record[group] for rank, record in records.items() if record.get(group)}
        last = {rank: found[max(found)] for rank, found in entered.items()}
        waiting = {rank: one for rank, one in last.items() if not one.done}
        if not waiting:
            continue
        where = _of_group(group)
        lines += _difference(entered, where)
        # The collective with the highest number is the one in which a rank waits for all others.
        number = max(one.number for one in waiting.values())
        inside: dict[Collective, list[int]] = {}
        for rank, one in waiting.items():
            if one.number == number:
                inside.setdefault(one, []).append(rank)
        members = next((one.members for one in last.values() if one.members), tuple(last))
        missing = [rank for rank in members if rank in records and (rank not in last or last[rank].number < number)]
        unknown = [rank for rank in members if rank not in records]
        complete = not missing and not unknown and len(inside) == 1
        suffix = "; all ranks of the group have reached it" if complete else ""
        for one, ranks in inside.items():
            lines.append(f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} in {one}{where}{suffix}")
        wanted = next(iter(inside)).name
        for rank in missing:
            before = last[rank].name if rank in last else "none"
            at = f"; is at {places[rank]}" if places.get(rank) else ""
            lines.append(f"rank {rank} has not reached {wanted} (last collective: {before}){at}")
        if unknown:
            lines.append(f"unknown whether {ranks_text(unknown)} reached {wanted}")
    return lines


def _of_group(group: str) -> str:
    return "" if group == DEFAULT_GROUP else f" of {group_label(group)}"


def _difference(entered: Mapping[int, Mapping[int, Collective]], where: str) -> list[str]:
    """Return lines about the first collective that the ranks called with different operations, shapes or types."""
    for number in sorted({number for found in entered.values() for number in found}):
        ones = {rank: found[number] for rank, found in sorted(entered.items()) if number in found}
        operations = {one.operation for one in ones.values()}
        if len(operations) > 1:
            each = ", ".join(
                f"rank {rank} {one.operation}{f' ({one.tensors})' if one.types else ''}" for rank, one in ones.items()
            )
            return [f"the ranks called different operations as collective #{number}{where}: {each}", _HINT]
        (operation,) = operations
        differ = {
            "shapes": operation in OF_ONE_SHAPE and len({one.shapes for one in ones.values()}) > 1,
            # Some operations, such as scatter, have an input on one rank only.
            "types": len({one.types for one in ones.values() if one.types}) > 1,
        }
        if any(differ.values()):
            what = " and ".join(name for name, one in differ.items() if one)
            each = ", ".join(f"rank {rank} {one.tensors}" for rank, one in ones.items())
            return [f"the ranks called {operation} #{number}{where} with different {what}: {each}", _HINT]
    return []


def _collective(entry: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> Collective:
    group = recorded_group(entry)
    created, timeout = entry.get("time_created_ns"), entry.get("timeout_ms")  # Older versions of torch have no timeout.
    return Collective(
        group=group,
        number=int(entry["collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        types=tuple(_TYPES.get(kind, kind) for kind in entry["input_dtypes"]),
        shapes=tuple(tuple(map(int, shape)) for shape in entry["input_sizes"]),
        done=bool(entry["retired"]) or entry["state"] == "completed",
        members=tuple(int(rank) for rank in members.get(group, ())),
        ends=float(created) / 1e9 + float(timeout) / 1e3 if created and timeout else None,
    )
