"""Tests of placement: the devices that a test gets if several are free."""

from __future__ import annotations

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


def test_a_test_gets_devices_that_belong_together(suite: Suite) -> None:
    """Before each test, a world has all devices, and gives them back together."""
    suite.without_torch()
    suite.write("machine.toml", MACHINE)
    suite.write(
        "test_it.py",
        """
        import pytest

        everything = pytest.mark.devices(4)


        @pytest.mark.devices(2)
        def test_like_ones(accel):
            assert [device.name for device in accel.devices] == ["Slow", "Slow"]


        @everything
        def test_all_1(): ...


        @pytest.mark.devices(1)
        def test_the_first_one(accel):
            assert [device.name for device in accel.devices] == ["Fast"]


        @everything
        def test_all_2(): ...


        @pytest.mark.devices(2, near="nvlink")
        def test_linked_ones(accel):
            assert [device.name for device in accel.devices] == ["Fast", "Odd"]


        @everything
        def test_all_3(): ...


        @pytest.mark.distributed(2, kind="sim", init=False)
        @pytest.mark.devices(near="numa")
        def test_neighbours(accel):
            assert accel.devices[0].numa == 0


        @everything
        def test_all_4(): ...


        @pytest.mark.devices(3, near="nvlink")
        def test_more_than_are_linked(accel):
            assert {"Fast", "Odd"} < {device.name for device in accel.devices}
        """,
    )
    assert suite.run("--accel", "sim:machine.toml").count() == {"PASSED": 9}
