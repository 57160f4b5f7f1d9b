from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.worlds.collectives import Collective, account, read_record


def entry(
    number: int, operation: str = "all_reduce", *, done: bool = True, group: str = "0", **more: Any
) -> dict[str, Any]:
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


def record(*entries: object) -> dict[str, Collective]:
    return read_record(json.dumps({"entries": entries, "members": {"0": [0, 1, 2]}}).encode())


def test_a_record_has_the_last_collective_of_each_group() -> None:
    found = record(entry(1), entry(2, "broadcast", done=False), entry(1, group="7"), entry(9, is_p2p=True))
    assert found == {
        "default_pg": Collective("default_pg", 2, "broadcast", "float32[2, 3]", done=False, members=(0, 1, 2)),
        "7": Collective("7", 1, "all_reduce", "float32[2, 3]", done=True),
    }
    assert record(entry(1, done=False, state="completed"))["default_pg"].done
    several = entry(1, input_dtypes=["Long", "Odd"], input_sizes=[[4], []])
    assert record(several)["default_pg"].tensors == "int64[4], Odd[]"


@given(st.binary() | st.just(b"[]") | st.just(b'{"entries": [{}]}') | st.just(b'{"entries": 3}'))
def test_what_is_no_record_tells_nothing(data: bytes) -> None:
    assert read_record(data) == {}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
entries = st.dictionaries(st.sampled_from(sorted(entry(1))), values).map(lambda changes: entry(1) | changes)


@given(st.lists(entries, max_size=3), st.dictionaries(st.just("0"), values) | values)
def test_whatever_a_record_says_can_be_told(given_entries: list[object], members: object) -> None:
    found = read_record(json.dumps({"entries": given_entries, "members": members}).encode())
    account({0: found, 1: OPEN}, {})


def test_numbers_that_are_none_make_no_record() -> None:
    data = json.dumps({"entries": [entry(1)]}).replace('seq_id": 1', 'seq_id": 1e400').encode()
    assert read_record(data) == {}
    assert read_record(b"[" * 9999) == {}


OPEN = record(entry(3), entry(4, done=False))


@pytest.mark.parametrize(
    ("records", "lines"),
    [
        ({}, []),
        ({0: record(entry(4)), 1: record(entry(4))}, []),
        ({0: OPEN, 1: OPEN, 2: OPEN}, ["ranks 0, 1, 2 are in all_reduce #4 (float32[2, 3]), and all have come"]),
        (
            {0: OPEN, 1: OPEN, 2: record(entry(3, "barrier"))},
            [
                "ranks 0, 1 are in all_reduce #4 (float32[2, 3])",
                "rank 2 has not come to all_reduce #4: its last was barrier #3 (float32[2, 3]); it is at test_x.py:9",
            ],
        ),
        (
            {0: OPEN, 2: {}},
            [
                "rank 0 is in all_reduce #4 (float32[2, 3])",
                "rank 2 has not come to all_reduce #4: it has entered none; it is at test_x.py:9",
                "whether rank 1 came to all_reduce #4 is not known",
            ],
        ),
        (
            {0: OPEN},
            [
                "rank 0 is in all_reduce #4 (float32[2, 3])",
                "whether ranks 1, 2 came to all_reduce #4 is not known",
            ],
        ),
        (
            {0: OPEN, 1: record(entry(4, "broadcast", done=False)), 2: OPEN},
            [
                "ranks 0, 2 are in all_reduce #4 (float32[2, 3])",
                "rank 1 is in broadcast #4 (float32[2, 3])",
            ],
        ),
        (
            {0: OPEN, 1: record(entry(3, done=False)), 2: OPEN},
            [
                "ranks 0, 2 are in all_reduce #4 (float32[2, 3])",
                "rank 1 has not come to all_reduce #4: its last was all_reduce #3 (float32[2, 3])",
            ],
        ),
        (
            {0: record(entry(2, done=False, group="7")), 1: record(entry(1, group="7")), 2: {}},
            [
                "rank 0 is in all_reduce #2 (float32[2, 3]) of group 7",
                "rank 1 has not come to all_reduce #2: its last was all_reduce #1 (float32[2, 3])",
            ],
        ),
    ],
)
def test_who_waits_and_who_has_not_come(records: dict[int, dict[str, Collective]], lines: list[str]) -> None:
    assert account(records, {2: "test_x.py:9", 1: ""}) == lines
