"""Tests of the recognition of deadlocks in the records of ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_accel.core.rank_names import DEFAULT_GROUP
from pytest_accel.diagnostics.deadlock import Position, deadlocked, read_position


def position(number: int, *, waits: bool = True, timeout: float = 3600, **more: Any) -> Position:
    """Return the position of a rank of three that has issued `number` collectives; it waits in the last."""
    entry = {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "retired": not waits,
        "state": "scheduled",
        "time_created_ns": 10_000_000_000,
        "timeout_ms": timeout * 1000,
    }
    record = {
        "entries": [entry | {name: value for name, value in more.items() if name in entry}] if number else [],
        "members": {DEFAULT_GROUP: [0, 1, 2]},
        "issued": {DEFAULT_GROUP: number},
        "now": 12.0,
        "waits_in": DEFAULT_GROUP if waits else None,
    }
    found = read_position(json.dumps(record | {name: more[name] for name in more.keys() & record.keys()}).encode())
    assert found is not None
    return found


WAITS = position(4)
BEHIND = position(3, waits=False)


@pytest.mark.parametrize(
    ("of_rank_2", "is_deadlock"),
    [
        (BEHIND, True),
        (position(0, waits=False), True),
        (position(4, waits=False), False),  # It has started the collective, and need not wait for it.
        (position(4, waits=False, profiling_name="gloo:barrier"), True),
        (position(4, waits=False, input_sizes=[[5]]), True),
        (position(4, waits=False, input_sizes=[[2, 2]]), False),
        (position(3, waits=False, issued={}), False),  # Other threads may issue a collective.
        (position(3, waits=False, members={DEFAULT_GROUP: [0, 2]}), False),
        (None, False),
    ],
)
def test_ranks_wait_for_a_rank_that_has_finished(of_rank_2: Position | None, is_deadlock: bool) -> None:
    positions = {0: WAITS, 1: WAITS} | ({} if of_rank_2 is None else {2: of_rank_2})
    found = deadlocked(positions, [0, 1], 300)
    assert set(found) == ({0, 1} if is_deadlock else set())


def test_each_unfinished_rank_must_stand_in_a_collective_that_cannot_complete() -> None:
    assert deadlocked({0: WAITS, 1: WAITS, 2: BEHIND}, [0, 1, 2], 300) == {}
    assert deadlocked({0: WAITS, 1: WAITS, 2: WAITS}, [0, 1, 2], 300) == {}
    assert set(deadlocked({0: WAITS, 1: WAITS, 2: position(3)}, [0, 1, 2], 300)) == set()
    other = position(4, profiling_name="gloo:barrier")
    assert set(deadlocked({0: WAITS, 1: WAITS, 2: other}, [0, 1, 2], 300)) == {0, 1, 2}


def test_a_timeout_of_torch_that_is_over_first_is_awaited() -> None:
    assert deadlocked({0: position(4, timeout=300), 1: WAITS, 2: BEHIND}, [0, 1], 299) == {}
    assert deadlocked({0: position(4, timeout=302), 1: WAITS, 2: BEHIND}, [0, 1], 299)
    assert position(4, time_created_ns=None).awaited is None


def test_an_invalid_record_has_no_position() -> None:
    for record in (b"", b"[]", b"{}", b'{"entries": [], "issued": 3}', b'{"entries": [], "members": {}, "issued": {}}'):
        assert read_position(record) is None
