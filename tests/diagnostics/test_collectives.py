"""Tests of the records of a rank's collectives, and of the description of ranks that wait in one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.group_names import DEFAULT_GROUP, group_label
from pytest_accel.diagnostics.collectives import Collective, Record, describe_waits, read_record


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
    document = {"entries": entries, "members": {DEFAULT_GROUP: [0, 1, 2]}, "numbers": numbers}
    return read_record(json.dumps(document).encode())


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


def test_groups_are_labelled_by_name() -> None:
    assert group_label("default_pg") == "the default process group"
    assert group_label("3") == "process group 3"
    assert group_label("3", "default_pg", "1") == "the default process group and process groups 1, 3"


@given(st.binary() | st.just(b"[]") | st.just(b'{"entries": [{}]}') | st.just(b'{"entries": 3}'))
def test_an_invalid_record_has_no_collectives(data: bytes) -> None:
    assert read_record(data) == {}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
entries = st.dictionaries(st.sampled_from(sorted(entry(1))), values).map(lambda changes: entry(1) | changes)


@given(st.lists(entries, max_size=3), st.dictionaries(st.just(DEFAULT_GROUP), values) | values)
def test_records_with_arbitrary_values_can_be_described(given_entries: list[object], members: object) -> None:
    found = read_record(json.dumps({"entries": given_entries, "members": members}).encode())
    describe_waits({0: found, 1: OPEN}, {})


def test_a_record_with_invalid_numbers_has_no_collectives() -> None:
    data = json.dumps({"entries": [entry(1)]}).replace('seq_id": 1', 'seq_id": 1e400').encode()
    assert read_record(data) == {}
    assert read_record(b"[" * 9999) == {}


HINT = "with --accel-debug, such a call raises an error on every rank"
OPEN = record(entry(3), entry(4, done=False))


@pytest.mark.parametrize(
    ("records", "lines"),
    [
        ({}, []),
        ({0: record(entry(4)), 1: record(entry(4))}, []),
        (
            {0: OPEN, 1: OPEN, 2: OPEN},
            ["ranks 0-2 are in all_reduce #4 (float32[2, 3]); all ranks of the group have reached it"],
        ),
        (
            {0: OPEN, 1: OPEN, 2: record(entry(3, "barrier"))},
            [
                "the ranks called different operations as collective #3: rank 0 all_reduce (float32[2, 3]), "
                "rank 1 all_reduce (float32[2, 3]), rank 2 barrier (float32[2, 3])",
                HINT,
                "ranks 0-1 are in all_reduce #4 (float32[2, 3])",
                "rank 2 has not reached all_reduce #4 (last collective: barrier #3); is at test_x.py:9",
            ],
        ),
        (
            {0: OPEN, 2: {}},
            [
                "rank 0 is in all_reduce #4 (float32[2, 3])",
                "rank 2 has not reached all_reduce #4 (last collective: none); is at test_x.py:9",
                "unknown whether rank 1 reached all_reduce #4",
            ],
        ),
        (
            {0: OPEN},
            [
                "rank 0 is in all_reduce #4 (float32[2, 3])",
                "unknown whether ranks 1-2 reached all_reduce #4",
            ],
        ),
        (
            {0: OPEN, 1: record(entry(4, "broadcast", done=False)), 2: OPEN},
            [
                "the ranks called different operations as collective #4: rank 0 all_reduce (float32[2, 3]), "
                "rank 1 broadcast (float32[2, 3]), rank 2 all_reduce (float32[2, 3])",
                HINT,
                "ranks 0, 2 are in all_reduce #4 (float32[2, 3])",
                "rank 1 is in broadcast #4 (float32[2, 3])",
            ],
        ),
        (
            {0: OPEN, 1: record(entry(3, done=False)), 2: OPEN},
            [
                "ranks 0, 2 are in all_reduce #4 (float32[2, 3])",
                "rank 1 has not reached all_reduce #4 (last collective: all_reduce #3)",
            ],
        ),
        (
            {0: record(entry(2, done=False, group="7")), 1: record(entry(1, group="7")), 2: {}},
            [
                "rank 0 is in all_reduce #2 (float32[2, 3]) of process group 7",
                "rank 1 has not reached all_reduce #2 (last collective: all_reduce #1)",
            ],
        ),
    ],
)
def test_waiting_and_missing_ranks_are_described(records: dict[int, Record], lines: list[str]) -> None:
    assert describe_waits(records, {2: "test_x.py:9", 1: ""}) == lines


def test_different_shapes_and_types_of_a_collective_are_described() -> None:
    waits = record(entry(1, done=False, input_sizes=[[4]]))
    start = "the ranks called all_reduce #1 with different "
    tail = [HINT, "rank 1 is in all_reduce #1 (float32[4]); all ranks of the group have reached it"]

    def first_lines(**rank_0: Any) -> list[str]:
        lines = describe_waits({0: record(entry(1, **rank_0)), 1: waits, 2: waits}, {})
        assert lines[1:] == [tail[0], tail[1].replace("rank 1 is", "ranks 1-2 are")]
        return lines[:1]

    assert first_lines(input_sizes=[[3]]) == [f"{start}shapes: rank 0 float32[3], rank 1 float32[4], rank 2 float32[4]"]
    assert first_lines(input_dtypes=["Double"], input_sizes=[[4]]) == [
        f"{start}types: rank 0 float64[4], rank 1 float32[4], rank 2 float32[4]"
    ]
    assert first_lines(input_dtypes=["Half"]) == [
        f"{start}shapes and types: rank 0 float16[2, 3], rank 1 float32[4], rank 2 float32[4]"
    ]


@pytest.mark.parametrize(
    ("operation", "sizes"),
    [("all_gather", ([[3]], [[4]])), ("all_to_all", ([[3]], [[9]])), ("scatter", ([[2, 3]], []))],
)
def test_uneven_shapes_are_not_reported_if_the_operation_allows_them(
    operation: str, sizes: tuple[list[list[int]], list[list[int]]]
) -> None:
    types = [["Float"] * len(size) for size in sizes]
    records = {
        rank: record(entry(1, operation, done=False, input_sizes=size, input_dtypes=kinds))
        for rank, (size, kinds) in enumerate(zip(sizes, types, strict=True))
    }
    assert not [line for line in describe_waits(records, {}) if "different" in line]
