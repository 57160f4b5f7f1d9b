"""Tests of the records of a rank's collectives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.messages.flight_record import Collective, FlightRecord, from_json, to_json
from tests.flight_records import entry, record


def test_a_record_has_the_collectives_of_each_group() -> None:
    found = record(entry(1), entry(2, "broadcast", done=False), entry(1, group="7"), entry(9, is_p2p=True))
    assert found.collectives == {
        "default_pg": {
            1: Collective("default_pg", 1, "all_reduce", ("float32",), ((2, 3),), done=True),
            2: Collective("default_pg", 2, "broadcast", ("float32",), ((2, 3),), done=False),
        },
        "7": {1: Collective("7", 1, "all_reduce", ("float32",), ((2, 3),), done=True)},
    }
    assert from_json(to_json(found)) == found
    assert record(entry(1, done=False, state="completed")).collectives["default_pg"][1].done
    several = entry(1, input_dtypes=["Long", "Odd"], input_sizes=[[4], []])
    assert record(several).collectives["default_pg"][1].tensors == "int64[4], Odd[]"


def test_collectives_of_a_destroyed_group_with_the_same_name_are_left_out() -> None:
    again = record(entry(1), entry(2), entry(1, "barrier"), default_pg=1)
    assert [one.operation for one in again.collectives["default_pg"].values()] == ["barrier"]
    assert record(entry(1), entry(2), default_pg=0).collectives == {}
    assert record(entry(1, process_group=["", ""])).collectives == {}
    assert record(entry(1), entry(2), default_pg=2).collectives == record(entry(1), entry(2)).collectives


INVALID = [b"[]", b'{"collectives": 3}', b'{"quiet": "x"}', b"[" * 9999]


@given(st.binary() | st.sampled_from(INVALID))
def test_an_invalid_record_is_empty(data: bytes) -> None:
    assert from_json(data) == FlightRecord()
