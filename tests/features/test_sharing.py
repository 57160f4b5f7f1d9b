"""Tests of shared devices: tests use a device at the same time if their shares fit, and otherwise wait."""

from __future__ import annotations

import pytest

from tests.features.conftest import Suite

# Two tests that wait for each other: opening a named pipe blocks until the other end is open, too.
WAITING_TESTS = """
    import os

    import pytest


    @pytest.fixture
    def pipe():
        path = os.path.join(os.path.dirname(__file__), "pipe")
        try:
            os.mkfifo(path)
        except FileExistsError:
            pass
        return path


    @pytest.mark.devices(share=0.5)
    def test_writes(pipe, accel):
        with open(pipe, "w") as end:
            end.write(accel.ids[0])


    @pytest.mark.devices(share="8GiB")
    def test_reads(pipe, accel):
        with open(pipe) as end:
            assert end.read() == accel.ids[0]
    """


def test_two_tests_use_one_device_at_the_same_time(suite: Suite) -> None:
    suite.without_torch()
    suite.write("machine.toml", '[[device]]\nmemory = "16GiB"\n')
    suite.write("test_it.py", WAITING_TESTS)
    run = suite.run("--accel=sim:machine.toml", "-n2", "--accel-timeout=60")
    assert run.count() == {"PASSED": 2}, run.text


@pytest.mark.long
def test_ranks_share_a_device_under_gloo(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(4)
        def test_four_on_one(accel, device, devices, gather, world_size):
            import torch
            import torch.distributed as dist

            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            assert total.item() == world_size
            assert gather(accel.ids) == [("sim-0",)] * 4
            assert accel.mask == {"SIM_VISIBLE_DEVICES": "sim-0"}
            assert len(devices) == 1


        @pytest.mark.devices(share=0.5)
        @pytest.mark.distributed(4)
        def test_two_on_each(accel, devices, gather):
            assert gather(accel.ids) == [("sim-0",), ("sim-0",), ("sim-1",), ("sim-1",)]
            assert accel.mask == {"SIM_VISIBLE_DEVICES": "sim-0,sim-1"}
            assert len(devices) == 2


        @pytest.mark.devices(2, share=0.5)
        @pytest.mark.distributed(2, visible="rank")
        def test_two_each(accel, devices, gather):
            assert gather(accel.ids) == [("sim-0", "sim-1")] * 2
            assert len(devices) == 2
        """,
    )
    run = suite.run("--accel=sim:2", "-o", "accel_share=0.25")
    assert run.count() == {"PASSED": 3}, run.text
