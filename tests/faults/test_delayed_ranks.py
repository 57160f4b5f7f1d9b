"""Tests of verdicts on ranks that are late: because the machine is busy, or just when the driver has given them up."""

from __future__ import annotations

import re
import sys

import pytest

from tests.background_suite import BackgroundSuite


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs the scheduler's figures of Linux")
def test_a_rank_that_gets_no_processor_has_more_time_after_a_failure(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import subprocess
        import sys
        import textwrap

        import pytest

        SPIN = '''
            import os, sys, time
            os.sched_setaffinity(0, {int(sys.argv[1])})
            print(flush=True)
            end = time.monotonic() + 5
            while time.monotonic() < end:
                pass
        '''


        @pytest.mark.distributed(2)
        def test_fails_on_one_rank(rank, gather):
            processor = min(os.sched_getaffinity(0))
            if rank == 1:
                command = [sys.executable, "-c", textwrap.dedent(SPIN), str(processor)]
                spinning = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
                for process in spinning:
                    process.stdout.readline()
                os.sched_setaffinity(0, {processor})
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            gather(rank)
            assert rank == 1
            while spinning[0].poll() is None:  # Computes for longer than the others have after a failure.
                pass
            for process in spinning:
                process.communicate()
        """,
    )
    run = suite.start().finish()
    run.expect({"test_fails_on_one_rank": "FAILED"})
    assert "rank 1: passed\n" in run.failure("test_fails_on_one_rank")


@pytest.mark.long
@pytest.mark.parametrize("end", ["timeout", "failure"])
def test_what_a_rank_does_while_it_is_given_up_does_not_contradict_the_verdict(
    suite: BackgroundSuite, end: str
) -> None:
    suite.write(
        "conftest.py",
        """
        import time
        from pathlib import Path

        from pytest_accel.diagnostics.diagnosis import Examiner

        HERE = Path(__file__).parent
        examine = Examiner.hung


        def examine_slowly(*arguments, **options):
            found = examine(*arguments, **options)
            (HERE / "go").touch()
            while not (HERE / "passed").exists():
                time.sleep(0.01)
            return found


        Examiner.hung = examine_slowly
        """,
    )
    suite.write(
        "test_it.py",
        f"""
        import time
        from pathlib import Path

        import pytest

        HERE = Path(__file__).parent


        @pytest.fixture
        def passing(rank):
            yield
            if rank == 1:
                (HERE / "passed").touch()
                while {end == "timeout"}:
                    time.sleep(0.01)


        @pytest.mark.distributed(2, timeout=4)
        def test_late(rank, passing):
            if rank == 1:
                while not (HERE / "go").exists():
                    time.sleep(0.01)
            assert rank == 1 or {end == "timeout"}
        """,
    )
    run = suite.start().finish()
    run.expect({"test_late": "FAILED"})
    report = run.failure("test_late")
    if end == "timeout":
        assert "\nrank 1: timed out\n" in report
    else:  # The rank may be stopped in its teardown, but no longer in the test.
        assert re.search(r"^rank 1: passed(; still running at .* in passing when .*)?$", report, re.MULTILINE)
