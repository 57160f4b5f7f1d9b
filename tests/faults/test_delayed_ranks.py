"""Tests of verdicts on ranks that are late because the machine is busy."""

from __future__ import annotations

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
