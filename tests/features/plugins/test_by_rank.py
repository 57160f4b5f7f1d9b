"""Tests of functions that convert and compare values of ranks."""

from __future__ import annotations

import enum
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest

from pytest_accel.features.plugins.by_rank import difference, to_plain


class Size(NamedTuple):
    width: int
    height: object


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(7), 7),
        (np.float32(0.25), 0.25),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (Level.HIGH, 3),
        (True, True),
        (Size(4, np.int8(5)), [4, 5]),
        (OrderedDict({np.int64(1): (2, None)}), {1: [2, None]}),
        (PurePosixPath("a/b"), "a/b"),
        (np.arange(2), "[0 1]"),
    ],
)
def test_numbers_and_containers_keep_their_values(value: object, expected: object) -> None:
    converted = to_plain(value)
    assert (converted, type(converted)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({0: "a", 1: "a"}, None),
        ({0: "a\nb", 1: "a\nc", 2: "a\nb"}, "--- ranks 0, 2\n+++ rank 1\n@@ -1,2 +1,2 @@\n a\n-b\n+c"),
        ({0: b"\xff", 1: b"\xff\xff"}, "rank 0: 1 bytes\nrank 1: 2 bytes, differs from byte 1 on"),
        ({0: "a\n", 1: "a\r\n"}, "rank 0 and rank 1 differ in line endings only"),
        ({0: "a", 1: None}, "rank 0: 1 characters\nrank 1: no value"),
    ],
)
def test_difference_shows_values_by_rank(values: dict[int, str | bytes | None], text: str | None) -> None:
    assert difference(values) == text
