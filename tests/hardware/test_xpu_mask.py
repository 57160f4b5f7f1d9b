"""Tests of Intel's masks. The expected values follow from the sources of the driver and of SYCL."""

from __future__ import annotations

import pytest

from pytest_accel.hardware.vendors.xpu_mask import read_affinity, read_selector


@pytest.mark.parametrize(
    ("text", "left"),
    [("", ((0, 1), (0,), (0, 1))), ("default", ((0, 1), (0,), (0, 1))), ("2,0", ((0, 1), (), (0, 1))),
     ("1,1", ((), (0,), ())), ("0.1,2.0", ((1,), (), (0,))), ("1.1", ((), (), ())), ("9,1", ((), (0,), ())),
     ("-1", ((), (), ())), ("0x2", ((), (), (0, 1))), ("1gpu", ((), (0,), ())), (" 1 ", ((), (0,), ())),
     ("08", ((0, 1), (), ())), ("02", ((), (), (0, 1))), ("4294967297", ((), (0,), ())), ("1,", ((), (0,), ())),
     ("0.5.7", ((), (), ())), ("9.x", ((), (), ())), ("0.", ((0, 1), (), ())),
     ("-18446744073709551615", ((), (0,), ()))],
)  # fmt: skip
def test_affinity_masks_select_tiles_of_cards(text: str, left: tuple[tuple[int, ...], ...]) -> None:
    assert read_affinity(text, (2, 1, 2), flat=False) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [("", ((0, 1), (0,), (0, 1))), ("4,0", ((0,), (), (1,))), ("2", ((), (0,), ())), ("0.1,2.0", ((), (), ())),
     ("5", ((), (), ())), ("0.x", ((), (), ()))],
)  # fmt: skip
def test_affinity_masks_select_tiles_that_are_devices(text: str, left: tuple[tuple[int, ...], ...]) -> None:
    assert read_affinity(text, (2, 1, 2), flat=True) == left


@pytest.mark.parametrize(
    "text", ["x", "0,,1", ",", ",0", ".1", "0.x", "0.1.2", "18446744073709551616", "1" * 9999, "Default", " "]
)
def test_affinity_masks_with_which_the_driver_does_not_start_are_unreadable(text: str) -> None:
    assert read_affinity(text, (2, 1, 2), flat=False) is None


@pytest.mark.parametrize(
    ("text", "left"),
    [("", ((0, 1), (0,), (0,))), ("level_zero:2,0", ((0, 1), (), (0,))), ("Level_Zero:GPU", ((0, 1), (0,), (0,))),
     ("*:1", ((), (0,), ())), ("opencl:*", ((), (), ())), ("opencl:0;level_zero:1", ((), (0,), ())),
     ("level_zero:0.1", ((1,), (), ())), ("level_zero:0.0,0.1", ((0, 1), (), ())), ("level_zero:*.*", ((0, 1), (), ())),
     ("level_zero:1.0", ((), (), ())), ("level_zero:0.7", ((), (), ())), ("level_zero:0.*.*", ((), (), ())),
     ("!level_zero:1", ((0, 1), (), (0,))), ("*:*;!level_zero:0.1", ((), (0,), (0,))), ("!*:gpu", ((), (), ())),
     ("!opencl:*", ((0, 1), (0,), (0,))), ("!*:cpu", ((0, 1), (0,), (0,))), ("level_zero:cpu,2", ((), (), (0,))),
     ("level_zero:1;;level_zero:2", ((), (0,), (0,))), ("level_zero:,1", ((), (0,), ())), (";", ((), (), ())),
    ],
)  # fmt: skip
def test_selectors_select_tiles_of_cards(text: str, left: tuple[tuple[int, ...], ...]) -> None:
    assert read_selector(text, (2, 1, 1)) == left


@pytest.mark.parametrize(
    "text",
    ["0", "level_zero", "level_zero:", ":0", "intel:0", "level_zero:0:1", "level_zero:x", "level_zero:gpu.0",
     "level_zero:*.0", "level_zero:0.*.1", "level_zero:0.1.2.3", "level_zero:0.", "level_zero:0..1", "level_zero:0.x",
     "level_zero:1x", "level_zero:-1",
     "!level_zero:0;level_zero:1", "level_zero:2147483648", "level_zero:" + "1" * 9999, " "],
)  # fmt: skip
def test_selectors_that_sycl_refuses_are_unreadable(text: str) -> None:
    assert read_selector(text, (2, 1, 1)) is None
