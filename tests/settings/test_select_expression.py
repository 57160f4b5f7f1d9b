"""Tests of the conditions of ``--accel-select``: which tests they select, and the errors of invalid ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.world_key import Needs
from pytest_accel.settings.select_expression import ExplainedError, parse

FOUR_RANKS = Needs(4, 4, 2, 2, "cuda", 40 * 2**30, ("gloo", "nccl"), 0.5, marked=True)
"""The needs of ``devices(memory="40GiB", share=0.5)`` with ``distributed(4, nodes=2)``."""


@st.composite
def _words(draw: st.DrawFn) -> str:
    parts = ("devices", "kind", "marked", "size", "and", "not", "in", "==", "<", "=", "(", ")", "2", "'cuda'", ",", "é")
    return " ".join(draw(st.lists(st.sampled_from(parts), max_size=7)))


@given(st.one_of(_words(), st.text(max_size=12)))
def test_the_error_of_any_invalid_text_marks_a_place(text: str) -> None:
    try:
        parse(text)(FOUR_RANKS)
    except ExplainedError as error:
        lines = str(error).splitlines()
        assert lines[-2] == f"    {' '.join(text.split())}"
        assert lines[-1].strip() == "^"
        assert len(lines[-1]) <= len(lines[-2]) + 1


@pytest.mark.parametrize(
    ("text", "selects"),
    [
        ("backend == 'nccl'", True),
        ("backend == 'GLOO'", True),
        ("backend != 'nccl'", False),
        ("backend in ('mpi', 'nccl')", True),
        ("backend not in ('mpi', 'ucc')", True),
        ("memory >= '40GiB'", True),
        ("memory > '40GiB'", False),
        ("'16GiB' < memory < '48GiB'", True),
        ("kind in ['cuda', 'rocm']", True),
        ("devices == world_size", True),
        ("1 < nodes <= ranks_per_node != 3 and not (share > 0.5 or devices not in (2, 4))", True),
        ("marked and fits and kind == 'cpu'", False),
        ("ranks_per_node\n  == 2", True),
    ],
)
def test_conditions_compare_backends_sizes_kinds_and_numbers(text: str, selects: bool) -> None:
    assert parse(text)(FOUR_RANKS) is selects


@pytest.mark.parametrize(
    ("text", "why", "place"),
    [
        ("devices", "devices alone is no condition, as in: devices >= 2", 0),
        ("fits and size > 2", "size is no word of a test's needs; allowed are devices, world_size, ", 9),
        ("kind == cuda", "cuda is no word of a test's needs; ", 8),
        ("fits or kind == 'cudda'", "kind 'cudda': allowed are cuda, rocm, ", 16),
        ("kind < 'cuda'", "kind is compared with ==, !=, in and not in, and with text", 0),
        ("devices = 2", "write == to compare", 8),
        ("devices == 'two'", "devices is compared otherwise, as in: devices >= 2", 0),
        ("2 == devices == 'two'", "devices is compared otherwise, as in: devices >= 2", 5),
        ("backend in ('gloo', 2)", "backend is compared otherwise, as in: backend == 'nccl'", 0),
        ("memory > '40 boxes'", "memory '40 boxes': allowed are a positive number with ", 9),
        ("devices == kind", "devices and kind is compared with ==, !=, in and not in, and with text", 0),
        ("devices in 'cuda'", "write == to compare, or in with a list such as ", 0),
        ("open('/etc/passwd')", "a condition compares what a test needs", 0),
        ("fits and fits.__class__", "a condition compares what a test needs", 9),
        ("devices + 1 > 2", "a condition compares what a test needs", 0),
        ("devices >= 2)", "unmatched ')'", 12),
    ],
)
def test_the_error_of_an_invalid_condition_has_reason_and_place(text: str, why: str, place: int) -> None:
    with pytest.raises(ExplainedError) as caught:
        parse(text)
    message, shown, mark = str(caught.value).splitlines()
    assert message.startswith(why)
    assert shown == f"    {text}"
    assert mark == f"    {' ' * place}^"


@pytest.mark.parametrize("text", ["(" * 300, "not " * 100_000 + "fits", "devices\0 > 2"], ids=["deep", "long", "nul"])
def test_a_text_that_python_cannot_parse_is_an_error(text: str) -> None:
    with pytest.raises(ExplainedError):
        parse(text)


def test_a_test_without_marks_needs_one_process_and_no_devices() -> None:
    for text in ("not marked", "fits", "devices == 0", "world_size == 1", "kind == 'none'", "backend != 'gloo'"):
        assert parse(text)(Needs())
