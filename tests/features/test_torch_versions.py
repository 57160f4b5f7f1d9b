"""Tests of sessions with a torch that no test has been run with, or that does not record collectives."""

from __future__ import annotations

import re
from importlib.metadata import version

from pytest_accel.compat import torch_api
from tests.features.conftest import Suite


def test_the_header_names_an_untested_torch_once_if_there_are_marked_tests(suite: Suite) -> None:
    suite.write("torch-99.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    suite.write("conftest.py", "")  # pytest makes its folder the first of sys.path.
    suite.write("test_plain.py", "def test_plain(): pass")
    suite.write("test_marked.py", "import pytest\n\n@pytest.mark.devices(1)\ndef test_marked(): pass")
    oldest, newest = torch_api.TESTED

    for options, expected in (("test_plain.py",), 0), (("-n1",), 1):
        run = suite.run(*options)
        assert run.ret == 0
        assert [line for line in run.text.splitlines() if "accel: torch" in line] == expected * [
            "accel: torch 99.0 is not among the releases that pytest-accel was tested with: "
            f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        ]


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
