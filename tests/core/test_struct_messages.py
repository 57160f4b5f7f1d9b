"""Tests of the form of messages between processes."""

from __future__ import annotations

import pytest
from msgspec import Struct

from pytest_accel.core.struct_messages import decode, encode


class Moved(Struct, frozen=True, tag=True):
    path: str
    sizes: dict[int, bytes]
    time: float


class Removed(Struct, frozen=True, tag=True):
    path: str


def test_a_message_arrives_unchanged() -> None:
    for message in (Moved("/a/\udcff", {3: b"\xff\0"}, float("inf")), Removed("")):
        data = encode(message)
        assert b"\n" not in data
        assert decode(data, Moved | Removed) == message


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"{}", b'{"type": "Moved", "path": 3}', b'{"type": "Other", "path": ""}', b"[" * 100_000],
    ids=["empty", "not UTF-8", "no type", "wrong type of a field", "of another conversation", "nested too deeply"],
)
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 The texts are those of two libraries.
        decode(data, Moved | Removed)
