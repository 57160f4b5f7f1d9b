"""Tests of the conversion of shares to parts of a device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_accel.core.device import Device, Share
from pytest_accel.hardware.shares import WHOLE, fraction, parts

GIB = 1024**3
A100 = Device("cuda", "GPU-1", 0, "NVIDIA A100", memory=80 * GIB)
UNKNOWN = Device("cuda", "GPU-2", 1, "NVIDIA GPU")


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (None, WHOLE),
        (Share(fraction=1.0), WHOLE),
        (Share(fraction=0.25), WHOLE // 4),
        (Share(fraction=0.29), WHOLE * 29 // 100),
        (Share(fraction=1e-12), 1),
        (Share(bytes=8 * GIB), WHOLE // 10),
        (Share(bytes=80 * GIB), WHOLE),
        (Share(bytes=80 * GIB + 1), None),
        (Share(bytes=1), 1),
    ],
)
def test_a_share_is_converted_to_parts_of_a_device(share: Share | None, expected: int | None) -> None:
    assert parts(share, A100) == expected


def test_a_share_of_a_device_for_a_single_process_is_the_whole_device() -> None:
    slot = Device("cpu", "cpu-0", 0, "CPU", single_process=True)
    exclusive = Device("cuda", "GPU-3", 2, "NVIDIA L4", memory=24 * GIB, single_process=True)
    for share in (Share(fraction=0.25), Share(bytes=8 * GIB)):
        assert parts(share, slot) == parts(share, exclusive) == WHOLE
    assert parts(Share(bytes=25 * GIB), exclusive) is None


def test_a_share_in_bytes_needs_a_device_with_known_memory() -> None:
    assert parts(Share(bytes=1), UNKNOWN) is None
    assert fraction(Share(bytes=1), UNKNOWN) == 1.0
    assert parts(Share(fraction=0.5), UNKNOWN) == WHOLE // 2


@given(st.integers(1, 1000))
def test_equal_fractions_fill_a_device(count: int) -> None:
    each = parts(Share(fraction=1 / count), A100)
    assert each is not None
    assert each * count <= WHOLE < (each + 1) * (count + 1)


@given(st.integers(1, 80 * GIB), st.integers(1, 80 * GIB))
def test_shares_in_bytes_never_exceed_the_memory(size: int, memory: int) -> None:
    taken = parts(Share(bytes=size), Device("cuda", "GPU-1", 0, "x", memory=memory))
    if taken is None:
        assert size > memory
    else:
        assert (WHOLE // taken) * size <= memory
