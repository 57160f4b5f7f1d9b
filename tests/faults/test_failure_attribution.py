"""Tests that each failure is reported in the right test and phase, and secondary failures below their cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.torch_release import RECORDS_COLLECTIVES

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite


def test_ranks_that_wait_for_a_rank_that_did_not_pass_are_secondary_failures(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import pytest
        import torch.distributed as dist

        two = pytest.mark.distributed(2, timeout=40)


        @two
        def test_one_skips(rank):
            if rank == 1:
                pytest.skip("not here")
            dist.barrier()


        @pytest.fixture
        def meets_at_its_end(rank):
            if rank == 1:
                raise ValueError("the cause")
            yield
            dist.barrier()


        @two
        def test_setup_fails_and_the_other_is_in_its_call(meets_at_its_end):
            dist.barrier()


        @pytest.mark.distributed(2, timeout=4)
        def test_setup_fails_and_the_other_is_in_its_teardown(meets_at_its_end):
            pass


        @two
        def test_last():
            dist.barrier()
        """,
    )
    suite.write(
        "conftest.py",
        """
        from pytest_accel.diagnostics import waiting_limits
        from pytest_accel.driver import world

        world.QUIET = 0.1


        def pytest_runtest_logstart(nodeid):
            # With a long grace period, a slow rank 0 still reaches the timeout of its teardown first.
            waiting_limits.GRACE = 60.0 if nodeid.endswith("in_its_teardown") else 3.0
        """,
    )
    run = suite.run()
    run.expect(
        {
            "test_one_skips": "FAILED",
            "test_setup_fails_and_the_other_is_in_its_call": "ERROR",
            "test_setup_fails_and_the_other_is_in_its_teardown": "ERROR",
            "test_last": "PASSED",
        }
    )
    assert "40 s" not in run.text
    assert "has been in its" not in run.text  # This hint is shown on a terminal only.
    report = run.failure("test_one_skips").splitlines()
    assert report[0] == "the ranks disagree in the call phase: rank 1 skipped, rank 0 ran"
    assert (
        "rank 0: still running at test_it.py:12 in test_one_skips when it was stopped 3 s after rank 1 skipped"
        in report
    )
    assert ("rank 1 has not reached barrier #1 (last collective: none)" in report) is RECORDS_COLLECTIVES
    in_call = "test_setup_fails_and_the_other_is_in_its_call"
    report = run.failure(in_call).splitlines()
    assert (
        f"rank 0: passed; still running at test_it.py:25 in {in_call} when it was stopped 3 s after rank 1 failed"
        in report
    )
    assert ("rank 0 is in barrier #1" in report) is RECORDS_COLLECTIVES
    report = run.failure("test_setup_fails_and_the_other_is_in_its_teardown").splitlines()
    teardown_failure = "timed out in the teardown phase after 4 s at test_it.py:20 in meets_at_its_end"
    assert report.index("E           ValueError: the cause") < report.index(f"rank 0: passed; {teardown_failure}")


@pytest.mark.long
def test_failures_are_reported_where_they_happened(suite: BackgroundSuite) -> None:
    """The cases are a hang next to a failing teardown, a test that a rank lacks, and collectives that differ."""
    suite.write(
        "test_teardown.py",
        """
        import threading

        import pytest


        @pytest.fixture
        def ends_before_the_other_begins(rank, shared_tmp_path):
            ended = shared_tmp_path / "ended"
            while rank == 1 and not ended.exists():
                pass
            yield
            if rank == 0:
                ended.touch()
                raise ValueError("the end fails")


        @pytest.mark.distributed(2, timeout=6)
        def test_hang(rank, ends_before_the_other_begins):
            if rank == 1:
                threading.Event().wait()
        """,
    )
    suite.write(
        "test_missing.py",
        """
        import os

        import pytest

        pytestmark = pytest.mark.distributed(2)


        @pytest.fixture(scope="module")
        def seen():
            names = []
            yield names
            assert names == ["before"]


        def test_before(seen):
            seen.append("before")


        if os.environ.get("RANK") != "1":

            def test_of_the_others():
                pass


        def test_after(seen):
            assert seen == []
            seen.append("before")
        """,
    )
    suite.write(
        "test_collectives.py",
        """
        import pytest
        import torch
        import torch.distributed as dist

        impatient = pytest.mark.distributed(2, timeout=6)


        @impatient
        def test_shapes(rank):
            dist.barrier()
            dist.all_reduce(torch.ones(3 if rank == 0 else 4))


        @impatient
        def test_operations(rank):
            if rank == 0:
                dist.all_reduce(torch.ones(3))
            else:
                dist.broadcast(torch.ones(3), src=0)
        """,
    )
    run = suite.run()
    run.expect(
        {
            "test_hang": "FAILED ERROR",
            "test_before": "PASSED",
            "test_of_the_others": "ERROR",
            "test_after": "PASSED",
            "test_shapes": "FAILED",
            "test_operations": "FAILED",
        }
    )
    hang = "timed out after 6 s: rank 1 is at test_teardown.py:21; rank 0 had finished"
    assert hang in run.failure("test_hang")
    missing = run.failure("test_of_the_others")
    assert (
        "this rank has not collected test_of_the_others, as the driver has; it has test_before, test_after" in missing
    )
    assert "rank 1 could not run the test" in run.text
    hint = "with --accel-debug, such a call raises an error on every rank"
    if not RECORDS_COLLECTIVES:
        return
    report = run.failure("test_shapes").splitlines()
    at = report.index("the ranks called all_reduce #2 with different shapes: rank 0 float32[3], rank 1 float32[4]")
    assert report[at + 1] == hint
    assert "rank 0: passed" in report
    assert "rank 1 is in all_reduce #2 (float32[4]); all ranks of the group have reached it" in report
    report = run.failure("test_operations").splitlines()
    calls = "rank 0 all_reduce (float32[3]), rank 1 broadcast (float32[3])"
    assert f"the ranks called different operations as collective #1: {calls}" in report


@pytest.mark.long
def test_frames_of_the_plugin_are_hidden(suite: BackgroundSuite) -> None:
    suite.write(
        "conftest.py",
        """
        import os

        import pytest


        if "WORLD_SIZE" not in os.environ:

            def pytest_runtest_setup(item):
                if item.name == "test_never":
                    pytest.skip("in the driver alone")


        @pytest.fixture(scope="module")
        def broken(rank):
            raise ValueError("broken fixture")


        @pytest.fixture(scope="module")
        def broken_end(rank):
            yield
            raise ValueError("broken end")
        """,
    )
    suite.write(
        "test_it.py",
        """
        import threading

        import pytest

        pytestmark = pytest.mark.distributed(2)


        def test_fixture(broken):
            pass


        def test_gather(gather):
            gather(threading.Lock())


        @pytest.mark.distributed(2, init=False)
        def test_no_group(process_group):
            pass


        def test_end(broken_end):
            pass


        def test_never():
            pass
        """,
    )
    suite.write("test_other.py", "import pytest\n\n\n@pytest.mark.distributed(2)\ndef test_after():\n    pass\n")
    run = suite.run("--tb=long")
    run.expect(
        {
            "test_fixture": "ERROR",
            "test_gather": "FAILED",
            "test_no_group": "ERROR",
            "test_end": "PASSED",
            "test_never": "SKIPPED",
            "test_after": "PASSED ERROR",
        }
    )
    assert "pytest_accel" not in run.text.partition("= ERRORS =")[2]
    assert "ranks 0-1: failed at conftest.py:16\n" in run.failure("test_fixture")
    assert "ERROR test_it.py::test_fixture - ranks 0-1: ValueError: broken fixture" in run.text
    assert "ranks 0-1: failed at test_it.py:14\n" in run.failure("test_gather")
    assert "FAILED test_it.py::test_gather - ranks 0-1: TypeError: gather() needs picklable " in run.text
    teardown_failure = run.failure("test_after")
    assert "teardown of the fixtures kept for test_it.py::test_never failed:" in teardown_failure
    assert 'conftest.py", line 22, in broken_end' in teardown_failure
    assert "_pytest" not in teardown_failure
    assert "\nthe fixture 'process_group' needs" in run.failure("test_no_group")


@pytest.mark.long
def test_an_error_in_a_late_teardown_names_the_test_that_was_expected(suite: BackgroundSuite) -> None:
    """The file of this test is never collected in the ranks."""
    (suite.path / "pkg").mkdir()
    suite.write("pkg/__init__.py", "")
    suite.write(
        "pkg/conftest.py",
        """
        import pytest


        @pytest.fixture(scope="package")
        def broken_end():
            yield
            raise ValueError("broken end")
        """,
    )
    one = "import pytest\n\n\n@pytest.mark.distributed(1)\ndef {}:\n    pass\n"
    suite.write("pkg/test_a.py", one.format("test_end(broken_end)"))
    suite.write("pkg/test_b.py", one.format("test_never()").replace("def", "@pytest.mark.skip(reason='never')\ndef"))
    suite.write("test_other.py", one.format("test_after()"))
    run = suite.run("--accel", "none", "pkg", "test_other.py")
    run.expect({"test_end": "PASSED", "test_never": "SKIPPED", "test_after": "PASSED ERROR"})
    text = "teardown of the fixtures kept for pkg/test_b.py::test_never failed:"
    assert text in run.failure("test_after")
