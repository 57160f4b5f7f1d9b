"""Tests of placement: the devices that a test gets if several are free."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

MACHINE = """
    [[device]]
    name = "Slow"
    numa = 0

    [[device]]
    name = "Fast"
    capability = "9.0"
    links = [{to = 3, via = "nvlink"}]

    [[device]]
    name = "Slow"
    numa = 1

    [[device]]
    name = "Odd"
    capability = "8.0"
    numa = 0
    """


@pytest.mark.long(except_for="test_linked_ones")
@pytest.mark.parametrize(
    "test",
    [
        "test_like_ones",
        pytest.param("test_the_first_one", marks=pytest.mark.long),
        "test_linked_ones",
        pytest.param("test_neighbours", marks=pytest.mark.long),
        "test_more_than_are_linked",
    ],
)
def test_a_test_gets_devices_that_belong_together(suite: Suite, test: str) -> None:
    """Each case runs in a session of its own, so that all devices are free."""
    suite.write("machine.toml", MACHINE)
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.devices(2)
        def test_like_ones(accel):
            assert [device.name for device in accel.devices] == ["Slow", "Slow"]


        @pytest.mark.devices(1)
        def test_the_first_one(accel):
            assert [device.name for device in accel.devices] == ["Fast"]


        @pytest.mark.devices(2, near="nvlink")
        def test_linked_ones(accel):
            assert [device.name for device in accel.devices] == ["Fast", "Odd"]


        @pytest.mark.distributed(2, kind="sim")
        @pytest.mark.devices(near="numa")
        def test_neighbours(accel):
            assert accel.devices[0].numa == 0


        @pytest.mark.devices(3, near="nvlink")
        def test_more_than_are_linked(accel):
            assert {"Fast", "Odd"} < {device.name for device in accel.devices}
        """,
    )
    run = suite.run("--accel", "sim:machine.toml", "-k", test)
    assert run.count() == {"PASSED": 1}, run.text
