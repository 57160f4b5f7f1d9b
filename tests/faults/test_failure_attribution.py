"""Tests that each failure is reported in the right test and phase, and secondary failures below their cause."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES
from tests.torch_release import RECORDS_COLLECTIVES


def test_ranks_that_wait_for_a_rank_that_did_not_pass_are_secondary_failures(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest
        from tests.inner import hang_here, note, wait_for
        from tests.lazy_torch import dist

        two = pytest.mark.distributed(2, timeout=40)


        @two
        def test_one_skips(rank):
            if rank == 1:
                wait_for("barrier")
                pytest.skip("not here")
            work = dist.barrier(async_op=True)
            note("barrier", "here")
            work.wait()


        @pytest.fixture
        def meets_at_its_end(rank):
            if rank == 1:
                wait_for("call")
                raise ValueError("the cause")
            yield
            hang_here()
            dist.barrier()


        @two
        def test_setup_fails_and_the_other_is_in_its_call(meets_at_its_end):
            note("call", "here")
            dist.barrier()


        @pytest.mark.distributed(2, timeout=50)
        def test_setup_fails_and_the_other_is_in_its_teardown(meets_at_its_end):
            note("call", "here")


        @pytest.fixture
        def torch_without_records():
            from torch._C import _distributed_c10d

            vars(_distributed_c10d).pop("_dump_fr_trace_json", None)


        @pytest.mark.distributed(2, fresh=True)
        def test_hangs_without_records(rank, torch_without_records):
            if rank == 0:
                hang_here()
                dist.barrier()


        @two
        def test_last():
            dist.barrier()
        """,
    )
    suite.write(
        "conftest.py",
        """
        from pytest_accel.diagnostics import waiting_limits


        def pytest_runtest_logstart(nodeid):
            # With a long grace period, rank 0 reaches the timeout of its teardown first.
            waiting_limits.GRACE = 60.0 if nodeid.endswith("in_its_teardown") else 3.0
        """,
    )
    run = suite.run(CAUSES, "--accel-record=record.jsonl", "-p", "tests.late_driver")
    run.expect(
        {
            "test_one_skips": "FAILED disagreed: skip",
            "test_setup_fails_and_the_other_is_in_its_call": "ERROR failed: ValueError; rank 1",
            "test_setup_fails_and_the_other_is_in_its_teardown": "ERROR failed: ValueError; rank 1",
            "test_hangs_without_records": "FAILED hung: phase timeout; rank 0",
            "test_last": "PASSED",
        }
    )
    assert "40 s" not in run.text
    unknown = (
        rf"the collectives are unknown: torch {re.escape(version('torch'))}\S* does not record them; torch 2\.8 does"
    )
    assert re.search(unknown, run.failure("test_hangs_without_records"))
    report = run.failure("test_one_skips").splitlines()
    assert ("rank 1 has not reached barrier #1 (last collective: none)" in report) is RECORDS_COLLECTIVES
    later = {
        "call": "when it was stopped 3 s after rank 1 failed",
        "teardown": "timed out in the teardown phase after 50 s",
    }
    for phase, text in later.items():
        report = run.failure(f"test_setup_fails_and_the_other_is_in_its_{phase}").splitlines()
        (line,) = [line for line in report if line.startswith("rank 0: passed; ")]
        assert text in line
        assert report.index("E           ValueError: the cause") < report.index(line)


@pytest.mark.long
def test_a_hang_beside_a_failing_teardown_is_a_failure_of_its_own_phase(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write(
        "test_teardown.py",
        """
        import threading

        import pytest
        from tests.inner import hang_here


        @pytest.fixture
        def ends_before_the_other_begins(rank, shared_tmp_path):
            ended = shared_tmp_path / "ended"
            while rank == 1 and not ended.exists():
                pass
            yield
            if rank == 0:
                ended.touch()
                raise ValueError("the end fails")


        @pytest.mark.distributed(2, init=False)
        def test_hang(rank, ends_before_the_other_begins):
            if rank == 1:
                hang_here()
                threading.Event().wait()
        """,
    )
    run = suite.run(CAUSES, "-p", "tests.late_driver")
    run.expect({"test_hang": "FAILED ERROR hung: phase timeout; rank 1, failed: ValueError; rank 0"})
