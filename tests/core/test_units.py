"""Tests of the parsing and formatting of memory sizes and compute capabilities."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.units import format_memory, parse_capability, parse_memory


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("40GiB", 40 * 1024**3),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("512MB", 512_000_000),
        ("2tb", 2_000_000_000_000),
        ("7B", 7),
        (" 1KiB ", 1024),
        (12345, 12345),
    ],
)
def test_memory_is_read_in_bytes(value: object, size: int) -> None:
    assert parse_memory(value) == size


@pytest.mark.parametrize(
    "value",
    [
        *("40", "40G", "GiB", "-1GiB", "0GiB", "0.5B", "1e3GiB", "", 0, -5, True, 1.5, None, "٤GiB"),
        pytest.param("9" * 308 + "GiB", id="infinite"),
        pytest.param("9" * 400 + "B", id="digits"),
    ],
)
def test_the_error_of_an_invalid_memory_names_the_value_and_what_is_allowed(value: object) -> None:
    message = (
        f"memory {value!r}: allowed are a positive number with KiB, MiB, GiB or TiB (1024-based), "
        "KB, MB, GB or TB (1000-based) or B, as in '40GiB', and a positive int for bytes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_memory(value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (80 * 1024**3, "80 GiB"),
        (85_000_000_000, "79.2 GiB"),
        (1023, "1023 B"),
        (1024**2 - 1, "1 MiB"),
        (3 * 1024**5, "3072 TiB"),
    ],
)
def test_memory_is_shown_with_the_unit_that_fits(size: int, text: str) -> None:
    assert format_memory(size) == text


@given(st.integers(1, 2**50))
def test_a_formatted_memory_is_exact_to_a_tenth_of_its_unit(size: int) -> None:
    assert parse_memory(format_memory(size)) == pytest.approx(size, rel=0.051)


@pytest.mark.parametrize(("value", "parts"), [("9.0", (9, 0)), ("12.1", (12, 1)), ("9", (9, 0)), (" 8.6 ", (8, 6))])
def test_a_capability_is_read_as_numbers(value: str, parts: tuple[int, ...]) -> None:
    assert parse_capability(value) == parts


@pytest.mark.parametrize("value", ["", "sm_90", "9.", ".9", "-9.0", 9.0, 9, None, "²"])
def test_the_error_of_an_invalid_capability_names_the_value_and_what_is_allowed(value: object) -> None:
    message = f"capability {value!r}: allowed is a string of numbers with dots between them, as in '9.0'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_capability(value)
