"""Records of collectives, as torch's flight recorder writes them."""

from __future__ import annotations

import json
from typing import Any

from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.diagnostics.collectives import Collective, collectives_in, read_record
from pytest_accel.messages.flight_record import COLLECTIVES


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


def record(*entries: object, **numbers: int) -> dict[str, dict[int, Collective]]:
    """Return the collectives in a record of `entries`. `numbers`: how many collectives each group has issued."""
    issued = {name: {COLLECTIVES: number} for name, number in numbers.items()}
    document = {"entries": entries, "members": {DEFAULT_GROUP: [0, 1, 2]}, "issued": issued}
    return collectives_in(read_record(json.dumps(document).encode()))
