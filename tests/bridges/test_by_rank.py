"""Tests of `to_plain`, which converts values that ranks send to plain data."""

from __future__ import annotations

import enum
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import pytest

from pytest_accel.features.plugins.by_rank import to_plain


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
