"""Tests of the serialization of exceptions that a rank sends to its driver."""

from __future__ import annotations

from traceback import format_exception_only
from urllib.error import HTTPError

import pytest

from pytest_accel.messages.serialization import stand_in_type


def test_a_stand_in_has_the_type_and_text_of_the_error_but_not_its_attributes() -> None:
    error = stand_in_type("urllib.error", "HTTPError", RuntimeError)("HTTP Error 500: oh no")
    assert isinstance(error, HTTPError)
    assert format_exception_only(error) == ["urllib.error.HTTPError: HTTP Error 500: oh no\n"]
    with pytest.raises(AttributeError):
        _ = error.headers
