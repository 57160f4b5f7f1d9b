"""Tests of sessions with a torch that does not record collectives."""

from __future__ import annotations

import re
from importlib.metadata import version

from tests.features.conftest import Suite


def test_a_hang_in_a_torch_that_records_no_collectives(suite: Suite) -> None:
    suite.write(
        "conftest.py",
        """
        import sys

        def pytest_runtest_setup():
            if "torch" in sys.modules:
                from torch._C import _distributed_c10d

                vars(_distributed_c10d).pop("_dump_fr_trace_json", None)
        """,
    )
    suite.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.distributed(2, timeout=2)
        def test_hangs(rank):
            import torch.distributed as dist

            if rank == 0:
                dist.barrier()

        @pytest.mark.distributed(2)
        def test_passes(rank):
            import torch.distributed as dist

            dist.barrier()
        """,
    )
    run = suite.run("--accel-record=record.jsonl")

    assert run.outcomes() == {"test_hangs": "FAILED", "test_passes": "PASSED"}
    release = rf"torch {re.escape(version('torch'))}\S* does not record them; torch 2\.8 does"
    assert re.search(f"the collectives are unknown: {release}", run.text), run.text
