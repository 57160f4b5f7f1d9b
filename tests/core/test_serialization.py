"""Tests of the serialization of exceptions that a rank sends to its driver."""

from __future__ import annotations

from traceback import format_exception_only
from urllib.error import HTTPError

import pytest

from pytest_accel.core.serialization import mark_repeated, sketch, stand_in_type


class ExampleError(Exception):
    """An exception whose attribute `exceptions` has any value; exception groups have an attribute of this name."""

    def __init__(self, exceptions: object) -> None:
        super().__init__("text")
        self.exceptions = self if exceptions is None else exceptions


@pytest.mark.parametrize("exceptions", [3, ["a"], ("a",), None, ()])
def test_an_exception_with_an_attribute_exceptions_is_not_treated_as_a_group(exceptions: object) -> None:
    found = sketch(ExampleError(exceptions))
    assert (found.text, found.peer, found.own) == ("text", None, False)


def test_a_group_repeats_a_peers_error_only_if_all_its_errors_do() -> None:
    one, other = ExampleError(()), ExampleError(())
    mark_repeated(one, 1, own=True)
    assert sketch(ExampleError((one, other))).peer is None
    mark_repeated(other, 1)
    found = sketch(ExampleError((one, other)))
    assert (found.peer, found.own) == (1, False)


def test_a_stand_in_has_the_type_and_text_of_the_error_but_not_its_attributes() -> None:
    error = stand_in_type("urllib.error", "HTTPError", RuntimeError)("HTTP Error 500: oh no")
    assert isinstance(error, HTTPError)
    assert format_exception_only(error) == ["urllib.error.HTTPError: HTTP Error 500: oh no\n"]
    with pytest.raises(AttributeError):
        _ = error.headers
