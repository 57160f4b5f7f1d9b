"""Which collective each rank is in, and who has not come: read from the records of torch's flight recorder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
"""c10's names of types, and those of `torch.dtype`."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The last collective that a rank has entered in a group."""

    group: str
    number: int
    """As the group counts them, from 1."""
    operation: str
    """``all_reduce``."""
    tensors: str
    """``float32[1024]``; with commas between several."""
    done: bool
    members: tuple[int, ...] = ()
    """The ranks of the group; empty where they are not known."""

    def __str__(self) -> str:
        return f"{self.operation} #{self.number}{f' ({self.tensors})' if self.tensors else ''}"


def read_record(record: bytes) -> dict[str, Collective]:
    """The last collective of each group, by the group's name; empty for what is no record."""
    try:
        told = json.loads(record)
        entries, members = told["entries"], told.get("members", {})
        found: dict[str, Collective] = {}
        for entry in entries:
            if not entry["is_p2p"]:
                one = _collective(entry, members)
                if one.group not in found or found[one.group].number <= one.number:
                    found[one.group] = one
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError):
        return {}
    return found


def account(records: Mapping[int, Mapping[str, Collective]], places: Mapping[int, str]) -> list[str]:
    """Lines about the groups in which somebody waits; `places` says where ranks are, of those of which it is known.

    Where a group's ranks are not told, it is taken to have those that have ever entered a collective of it. Of a rank
    without a record, such as a dead one, is said that it is not known.
    """
    lines: list[str] = []
    for group in sorted({group for record in records.values() for group in record}):
        last = {rank: record[group] for rank, record in records.items() if group in record}
        waiting = {rank: one for rank, one in last.items() if not one.done}
        if not waiting:
            continue
        # Who has gone furthest waits for all others.
        number = max(one.number for one in waiting.values())
        inside: dict[Collective, list[int]] = {}
        for rank, one in waiting.items():
            if one.number == number:
                inside.setdefault(one, []).append(rank)
        members = next((one.members for one in last.values() if one.members), tuple(last))
        missing = [rank for rank in members if rank in records and (rank not in last or last[rank].number < number)]
        unknown = [rank for rank in members if rank not in records]
        where = "" if group == "default_pg" else f" of group {group}"
        if not missing and not unknown and len(inside) == 1:
            lines.append(f"{_ranks(list(waiting))} in {next(iter(inside))}{where}, and all have come")
        for one, ranks in inside.items():
            if missing or unknown or len(inside) > 1:
                lines.append(f"{_ranks(ranks)} in {one}{where}")
        for rank in missing:
            before = last.get(rank)
            so_far = f"its last was {before}" if before is not None else "it has entered none"
            at = f"; it is at {places[rank]}" if places.get(rank) else ""
            lines.append(f"rank {rank} has not come to {next(iter(inside)).operation} #{number}: {so_far}{at}")
        if unknown:
            who = f"rank{'s' if len(unknown) > 1 else ''} {', '.join(map(str, unknown))}"
            lines.append(f"whether {who} came to {next(iter(inside)).operation} #{number} is not known")
    return lines


def _collective(entry: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> Collective:
    name, description = entry["process_group"]
    shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    return Collective(
        group=str(description if description == "default_pg" else name),
        number=int(entry["collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        tensors=", ".join(f"{_TYPES.get(kind, kind)}[{', '.join(map(str, shape))}]" for kind, shape in shapes),
        done=bool(entry["retired"]) or entry["state"] == "completed",
        members=tuple(int(rank) for rank in members.get(str(name), ())),
    )


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)))
    return f"rank {listed} is" if len(ranks) == 1 else f"ranks {listed} are"
