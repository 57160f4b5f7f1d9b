"""Tests of the form of messages: what a process can send to another."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any
from warnings import WarningMessage

import pytest

from pytest_accel.messages.rank_messages import CannotRun, PhaseReport, RankMessages
from pytest_accel.messages.serialization import plain, sketch_warning
from pytest_accel.messages.struct_messages import decode, encode


class Name(str):
    """A subclass of a plain type."""


class Operation(Enum):
    """An enumeration whose values are no plain data."""

    ADD = object()


class Unreadable(UserWarning):
    """A warning that has no text."""

    def __str__(self) -> str:
        raise RuntimeError


PLAIN = [None, True, 1 << 70, float("inf"), "\udcff \0", b"\xff", {"a": {1: ()}}, ("a", [("b",)])]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (PLAIN, PLAIN),
        ((Name("a"), {Name("b"): Operation.ADD}), ("a", {"b": "Operation.ADD"})),
        ({"path": Path("a"), "odd": Unreadable()}, {"path": "a", "odd": "<str() of it raised RuntimeError>"}),
        ({1.5}, "{1.5}"),
    ],
)
def test_a_report_may_have_any_value_and_text_stands_for_what_is_no_plain_data(value: Any, read: Any) -> None:
    sent = PhaseReport(1, "call", plain({"value": value}))
    assert decode(encode((sent,)), RankMessages)[0].report == {"value": read}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "EOF"),
        (b"rubbish", "marshal"),
        (encode((CannotRun("a"),))[:-1], "EOF|marshal"),
        (encode((5,)), "Expected `.*`, got `int`"),
    ],
    ids=["nothing", "rubbish", "truncated", "another"],
)
def test_data_that_are_no_message_of_the_conversation_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(data, RankMessages)


def test_an_object_in_a_message_is_named() -> None:
    with pytest.raises(TypeError, match=r"a message cannot have a value of the type PosixPath: PosixPath\('a'\)"):
        encode({"value": Path("a")})


def test_a_warning_without_a_text_is_no_error() -> None:
    found = sketch_warning(WarningMessage(Unreadable(), Unreadable, "a.py", 3), None)
    assert (found.message, found.category) == ("<str() of it raised RuntimeError>", "Unreadable")
