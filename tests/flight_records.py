"""Records of ranks, from what torch's flight recorder has of their collectives."""

from __future__ import annotations

from typing import Any

from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.messages.flight_record import FlightRecord
from pytest_accel.messages.rank_messages import GroupUse
from pytest_accel.rank.group_state import collectives_in


def entry(
    number: int, operation: str = "all_reduce", *, done: bool = True, group: str = "0", **more: Any
) -> dict[str, Any]:
    """Return one entry of a record, as torch's flight recorder writes it."""
    description = "default_pg" if group == "0" else "undefined"
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[2, 3]],
        "is_p2p": False,
        "process_group": [group, description],
        "profiling_name": f"gloo:{operation}",
        "retired": done,
        "state": "scheduled",
        **more,
    }


def record(*entries: dict[str, Any], **numbers: int) -> FlightRecord:
    """Return the record of a rank of three with `entries`. `numbers`: how many collectives each group has issued."""
    uses = {DEFAULT_GROUP: GroupUse((0, 1, 2), None)}
    uses |= {name: GroupUse((0, 1, 2), number) for name, number in numbers.items()}
    return FlightRecord(collectives_in(entries, uses), uses)
