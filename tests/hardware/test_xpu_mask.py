"""Tests of Intel's masks. The expected values follow from the sources of the driver and of SYCL."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.hardware.vendors.xpu_mask import Card, read_affinity, read_masks, read_selector

NAMES = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ZE_FLAT_DEVICE_HIERARCHY")


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
     ("level_zero:-1", ((), (), ())), ("level_zero:1x", ((), (0,), ()))],
)  # fmt: skip
def test_selectors_select_tiles_of_cards(text: str, left: tuple[tuple[int, ...], ...]) -> None:
    assert read_selector(text, (2, 1, 1)) == left


@pytest.mark.parametrize(
    "text",
    ["0", "level_zero", "level_zero:", ":0", "intel:0", "level_zero:0:1", "level_zero:x", "level_zero:gpu.0",
     "level_zero:*.0", "level_zero:0.*.1", "level_zero:0.1.2.3", "level_zero:0.", "level_zero:0..1", "level_zero:0.x",
     "!level_zero:0;level_zero:1", "level_zero:2147483648", "level_zero:" + "1" * 9999, " "],
)  # fmt: skip
def test_selectors_that_sycl_refuses_are_unreadable(text: str) -> None:
    assert read_selector(text, (2, 1, 1)) is None


numbers = st.integers(-2, 5).map(str) | st.sampled_from(["", " 1", "0x1", "01", "*", "gpu", "cpu", "x", "99999999999"])
places = st.lists(numbers, min_size=1, max_size=3).map(".".join)
lists = st.lists(places, max_size=4).map(",".join)
terms = st.builds("{}{}:{}".format, st.sampled_from(("", "", "!")), st.sampled_from(("level_zero", "*", "cuda")), lists)
texts = lists | st.lists(terms, max_size=3).map(";".join) | st.text("0123456789.,-+ x*!:;levzrogpu_\t\u0663\u0130")
counts = st.lists(st.integers(1, 3), max_size=5)


@given(texts, counts, st.booleans())
def test_no_text_raises_or_leaves_missing_tiles(text: str, tiles: list[int], flat: bool) -> None:
    for left in (read_affinity(text, tiles, flat), read_selector(text, tiles)):
        assert left is None or len(left) == len(tiles)
        for found, count in zip(left or (), tiles, strict=False):
            assert sorted(set(found)) == list(found)
            assert set(found) <= set(range(count))


cards = st.lists(st.builds(Card, st.booleans(), st.integers(1, 3), st.booleans()), max_size=5)
modes = st.sampled_from(("1", "0", "FLAT", "COMPOSITE", "COMBINED"))
environs = st.dictionaries(st.sampled_from(NAMES), texts | modes)


@given(environs, cards)
def test_no_environment_raises_or_leaves_a_card_twice(environ: dict[str, str], cards: list[Card]) -> None:
    reading = read_masks(environ, cards)
    present = [*reading.left, *reading.unused]
    assert len(set(present)) == len(present)
    assert set(present) <= set(range(len(cards)))
    assert set(reading.partly) <= set(reading.left)
    assert len({cards[at].discrete for at in reading.left}) <= 1
    assert not (reading.unreadable and present)
