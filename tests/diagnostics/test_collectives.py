"""Tests of the records of a rank's collectives."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.truncation import DEFAULT_GROUP
from pytest_accel.diagnostics.collectives import Collective, collectives_in, read_record, waits
from tests.flight_records import entry, record


def test_a_record_has_the_collectives_of_each_group() -> None:
    found = record(entry(1), entry(2, "broadcast", done=False), entry(1, group="7"), entry(9, is_p2p=True))
    members = (0, 1, 2)
    assert found == {
        "default_pg": {
            1: Collective("default_pg", 1, "all_reduce", ("float32",), ((2, 3),), done=True, members=members),
            2: Collective("default_pg", 2, "broadcast", ("float32",), ((2, 3),), done=False, members=members),
        },
        "7": {1: Collective("7", 1, "all_reduce", ("float32",), ((2, 3),), done=True)},
    }
    assert record(entry(1, done=False, state="completed"))["default_pg"][1].done
    several = entry(1, input_dtypes=["Long", "Odd"], input_sizes=[[4], []])
    assert record(several)["default_pg"][1].tensors == "int64[4], Odd[]"


def test_collectives_of_a_destroyed_group_with_the_same_name_are_left_out() -> None:
    again = record(entry(1), entry(2), entry(1, "barrier"))
    assert [one.operation for one in again["default_pg"].values()] == ["barrier"]
    assert record(entry(1), entry(2), default_pg=1) == {}
    assert record(entry(1, process_group=["", ""])) == {}
    assert record(entry(1), entry(2), default_pg=2) == record(entry(1), entry(2))


NO_NUMBER = json.dumps({"entries": [entry(1)]}).replace('seq_id": 1', 'seq_id": 1e400').encode()
INVALID = [b"[]", b'{"entries": [{}]}', b'{"entries": 3}', NO_NUMBER, b"[" * 9999]


@given(st.binary() | st.sampled_from(INVALID))
def test_an_invalid_record_has_no_collectives(data: bytes) -> None:
    assert collectives_in(read_record(data)) == {}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
entries = st.dictionaries(st.sampled_from(sorted(entry(1))), values).map(lambda changes: entry(1) | changes)


@given(st.lists(entries, max_size=3), st.dictionaries(st.just(DEFAULT_GROUP), values) | values)
def test_records_with_arbitrary_values_can_be_compared(given_entries: list[object], members: object) -> None:
    found = collectives_in(read_record(json.dumps({"entries": given_entries, "members": members}).encode()))
    waits({0: found, 1: record(entry(3), entry(4, done=False))})
