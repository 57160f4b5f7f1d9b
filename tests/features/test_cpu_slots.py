"""Test of the slots on which ranks run that have no devices but the CPU."""

from __future__ import annotations

import sys

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks for the affinity")


def test_ranks_stay_in_their_slot(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import os

        import pytest
        from tests.lazy_torch import torch


        @pytest.mark.distributed(2, kind="cpu")
        @pytest.mark.devices(1)
        def test_ranks(accel, gather):
            (slot,) = accel.devices
            assert os.sched_getaffinity(0) == set(slot.cores)
            assert torch.get_num_threads() == len(slot.cores) == int(os.environ["OMP_NUM_THREADS"])
            others = gather(slot.id)
            assert len(set(others)) == 2


        @pytest.mark.devices(2, kind="cpu")
        def test_one_process(accel):
            cores = {core for slot in accel.devices for core in slot.cores}
            assert os.sched_getaffinity(0) == cores
            assert torch.get_num_threads() == len(cores)


        @pytest.mark.distributed(1, kind="cpu")
        def test_next():
            pass
        """,
    )
    run = suite.run("--accel", "cpu:2")
    assert run.count() == {"PASSED": 3}, run.text
