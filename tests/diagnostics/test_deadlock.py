"""Tests of the recognition of deadlocks in the records of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.diagnostics.collectives import deadlocked, lacking
from pytest_accel.messages.flight_record import FlightRecord, RankWait
from pytest_accel.messages.rank_messages import Channel, GroupUse
from tests.flight_records import entry
from tests.flight_records import record as flight_record


def record(number: int, *, waits: bool = True, **more: Any) -> FlightRecord:
    """Return the record of a rank of three that has issued `number` collectives; it waits in the last."""
    entries = [entry(number, done=not waits, **more)] if number else []
    wait = RankWait("collective", DEFAULT_GROUP, number, (0, 1, 2)) if waits else None
    return replace(flight_record(*entries, **{DEFAULT_GROUP: number}), wait=wait, quiet=3600)


WAITS = record(4)
BEHIND = record(3, waits=False)


@pytest.mark.parametrize(
    ("of_rank_2", "is_deadlock"),
    [
        (BEHIND, True),
        (record(0, waits=False), True),
        (record(4, waits=False), False),  # It has started the collective, and need not wait for it.
        (record(4, waits=False, profiling_name="gloo:barrier"), True),
        (record(4, waits=False, input_sizes=[[5]]), True),
        (record(4, waits=False, input_sizes=[[3, 2]]), False),
        (replace(BEHIND, quiet=0), False),  # Other threads may issue a collective.
        (replace(BEHIND, uses={DEFAULT_GROUP: GroupUse((0, 2), 3)}), False),
    ],
)
def test_ranks_wait_for_a_rank_that_has_finished(of_rank_2: FlightRecord, is_deadlock: bool) -> None:
    found = deadlocked({0: WAITS, 1: WAITS, 2: of_rank_2}, [0, 1], 300)
    assert set(found) == ({0, 1} if is_deadlock else set())


def test_each_unfinished_rank_must_wait_for_an_operation_that_cannot_complete() -> None:
    assert deadlocked({0: WAITS, 1: WAITS, 2: BEHIND}, [0, 1, 2], 300) == {}
    assert deadlocked({0: WAITS, 1: WAITS, 2: WAITS}, [0, 1, 2], 300) == {}
    assert deadlocked({0: WAITS, 1: WAITS, 2: record(3)}, [0, 1, 2], 300) == {}
    other = record(4, profiling_name="gloo:barrier")
    assert set(deadlocked({0: WAITS, 1: WAITS, 2: other}, [0, 1, 2], 300)) == {0, 1, 2}


def test_a_timeout_of_torch_that_is_over_first_is_awaited() -> None:
    assert deadlocked({0: replace(WAITS, quiet=299), 1: WAITS, 2: BEHIND}, [0, 1], 299) == {}
    assert deadlocked({0: replace(WAITS, quiet=300), 1: WAITS, 2: BEHIND}, [0, 1], 299)


SENT, SENT_1 = (False, 0, 0), (False, 0, 1)
RECEIVED, RECEIVED_ANY = (True, 0, 0), (True, None, 0)


@pytest.mark.parametrize(
    ("wait", "counts", "expected"),
    [
        (RankWait("receive", "1", 3, (1,), (SENT,)), {1: {SENT: 2}}, {1: 2}),
        (RankWait("receive", "1", 3, (1,), (SENT,)), {1: {SENT: 3}}, {}),
        (RankWait("receive", "1", 3, (1,), (SENT,)), {1: {SENT_1: 3}}, {1: 0}),
        (RankWait("receive", "1", 3, (1, 2), (SENT,)), {1: {SENT: 2}, 2: {SENT: 1}}, {}),
        (RankWait("receive", "1", 3, (1, 2), (SENT,)), {1: {SENT: 2}}, {1: 2, 2: 0}),
        (RankWait("send", "1", 2, (1,), (RECEIVED, RECEIVED_ANY)), {1: {RECEIVED_ANY: 1}}, {1: 1}),
        (RankWait("send", "1", 2, (1,), (RECEIVED, RECEIVED_ANY)), {1: {RECEIVED: 1, RECEIVED_ANY: 1}}, {}),
    ],
)
def test_messages_are_counted_by_sender_receiver_and_tag(
    wait: RankWait, counts: dict[int, dict[Channel, int]], expected: dict[int, int]
) -> None:
    messages = [tuple(counts.get(rank, {}).items()) for rank in range(3)]
    records = {rank: FlightRecord(uses={"1": GroupUse((0, 1, 2), 0, messages[rank])}) for rank in range(3)}
    assert lacking(0, records | {0: replace(records[0], wait=wait)}) == expected


def test_calls_of_an_exchange_are_counted() -> None:
    records = {rank: FlightRecord(exchanges={"gather": 2 - rank}) for rank in range(3)}
    wait = RankWait("exchange", "gather", 2, (0, 1, 2))
    assert lacking(0, records | {0: replace(records[0], wait=wait)}) == {1: 1, 2: 0}
