"""Tests of ranks that die during a test or after it: only that test or the session fails."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite


def test_a_rank_that_dies_fails_the_test_in_the_phase_of_its_death(suite: BackgroundSuite) -> None:
    suite.write(
        "test_deaths.py",
        """
        import ctypes
        import os
        import signal
        import sys

        import pytest
        import torch
        import torch.distributed as dist

        pytestmark = pytest.mark.distributed(2)


        def kill_self():
            os.kill(os.getpid(), signal.SIGKILL)


        @pytest.fixture(scope="module")
        def tests_of_this_world():
            return []


        @pytest.fixture
        def dies_in_setup(rank):
            if rank == 1:
                kill_self()


        @pytest.fixture
        def dies_in_teardown(rank):
            yield
            if rank == 1:
                kill_self()


        def test_first(tests_of_this_world, request):
            tests_of_this_world.append(request.node.name)


        def test_same_world(tests_of_this_world):
            assert tests_of_this_world == ["test_first"]


        def test_sigkill(rank):
            if rank == 1:
                kill_self()


        def test_world_is_new(tests_of_this_world, world_size):
            assert tests_of_this_world == []
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == world_size


        def test_segfault(rank):
            if rank == 0:
                ctypes.string_at(0)


        def test_abort(rank):
            if rank == 1:
                os.abort()


        def test_sigterm(rank):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)


        def test_exit_0(rank):
            if rank == 1:
                os._exit(0)


        def test_exit_3(rank):
            if rank == 0:
                os._exit(3)


        def test_all_exit_0():
            os._exit(0)


        def test_setup(dies_in_setup):
            pass


        def test_teardown(dies_in_teardown):
            pass


        def test_while_another_waits_for_it(rank):
            if rank == 0:
                kill_self()
            dist.barrier()


        def test_becomes_another_program(rank):
            if rank == 1:
                os.execv("/bin/sh", ["sh", "-c", "exit 0"])


        def test_stays_as_another_program(rank):
            if rank == 1:
                os.execv("/bin/sh", ["sh", "-c", "while :; do read line || exec sleep 1000; done"])


        def test_sys_exit_0():
            sys.exit(0)


        def test_sys_exit_text(rank):
            if rank == 1:
                sys.exit("no more")


        @pytest.mark.distributed(4)
        def test_one_of_four(rank):
            if rank == 2:
                kill_self()


        @pytest.mark.distributed(4)
        def test_three_of_four(rank):
            if rank:
                kill_self()


        @pytest.mark.xfail(strict=True, raises=AssertionError, reason="another reason")
        def test_death_is_not_the_expected_failure(rank):
            if rank == 1:
                kill_self()


        def test_last(tests_of_this_world):
            assert tests_of_this_world == []
        """,
    )
    suite.write(
        "test_one_process.py",
        """
        import os

        import pytest


        @pytest.mark.devices(2)
        def test_no_ranks():
            os._exit(0)


        @pytest.mark.devices(2)
        def test_no_ranks_after(devices):
            assert len(devices) == 2
        """,
    )
    run = suite.run()
    run.expect(
        {
            "test_first": "PASSED",
            "test_same_world": "PASSED",
            "test_sigkill": "FAILED",
            "test_world_is_new": "PASSED",
            "test_segfault": "FAILED",
            "test_abort": "FAILED",
            "test_sigterm": "FAILED",
            "test_exit_0": "FAILED",
            "test_exit_3": "FAILED",
            "test_all_exit_0": "FAILED",
            "test_setup": "ERROR",
            "test_teardown": "PASSED ERROR",
            "test_while_another_waits_for_it": "FAILED",
            "test_becomes_another_program": "FAILED",
            "test_stays_as_another_program": "FAILED",
            "test_sys_exit_0": "FAILED",
            "test_sys_exit_text": "FAILED",
            "test_one_of_four": "FAILED",
            "test_three_of_four": "FAILED",
            "test_death_is_not_the_expected_failure": "FAILED",
            "test_last": "PASSED",
            "test_no_ranks": "FAILED",
            "test_no_ranks_after": "PASSED",
        }
    )
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "errors outside of any test" not in run.text
    expected_texts = {
        "test_sigkill": "rank 1 was killed by SIGKILL",
        "test_segfault": "rank 0 was killed by SIGSEGV",
        "test_abort": "rank 1 was killed by SIGABRT",
        "test_sigterm": "rank 1 was killed by SIGTERM",
        "test_exit_0": "rank 1 exited with status 0",
        "test_exit_3": "rank 0 exited with status 3",
        "test_all_exit_0": "ranks 0-1 exited with status 0",
        "test_setup": "rank 1 was killed by SIGKILL in the setup phase",
        "test_teardown": "rank 1 was killed by SIGKILL in the teardown phase",
        "test_while_another_waits_for_it": "rank 0 was killed by SIGKILL",
        "test_becomes_another_program": "rank 1 exited with status 0",
        "test_stays_as_another_program": "rank 1 lost its connection to the driver",
        "test_sys_exit_0": "SystemExit: 0",
        "test_sys_exit_text": "SystemExit: no more",
        "test_one_of_four": "rank 2 was killed by SIGKILL",
        "test_three_of_four": "ranks 1-3 were killed by SIGKILL",
        "test_death_is_not_the_expected_failure": "rank 1 was killed by SIGKILL",
        "test_no_ranks": "the test's process exited with status 0",
    }
    for test, text in expected_texts.items():
        assert text in run.failure(test)
    secondary = "rank 1: lost its connection after rank 0 died, at test_deaths.py:"
    assert secondary in run.failure("test_while_another_waits_for_it")
    crash_report = run.failure("test_segfault")
    assert re.search(r"E   rank 0 was killed by SIGSEGV at test_deaths.py:\d+ in test_segfault", crash_report)
    assert "Extension modules" not in crash_report
    assert "_pytest" not in crash_report


def test_the_sockets_of_multiprocessing_do_not_outlive_killed_ranks(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import multiprocessing
        import os
        import signal

        import pytest


        @pytest.mark.distributed(2)
        def test_dies(rank, gather):
            manager = multiprocessing.Manager()
            assert manager.dict() == {}
            gather(rank)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        """,
    )
    suite.run().expect({"test_dies": "FAILED"})
    assert list(suite.temporary.glob("pymp-*")) == []


@pytest.mark.long
def test_a_rank_that_dies_after_its_test_has_passed_fails_the_session(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import threading
        from pathlib import Path

        import pytest

        distributed = pytest.mark.distributed(2)


        @pytest.fixture
        def victim(rank, world_size):
            if rank == world_size - 1:
                Path(__file__).with_name("victim").write_text(str(os.getpid()))


        @pytest.fixture(scope="session")
        def ends_badly(rank):
            yield
            if rank == 0:
                os._exit(0)


        def ends_when_allowed(fifo):
            fifo.read_text()
            os._exit(0)


        @distributed
        def test_killed_at_its_end(victim):
            pass


        @distributed
        def test_after_that():
            pass


        @distributed
        def test_killed_before_the_next_begins(victim):
            pass


        def test_unmarked():
            pass


        @distributed
        def test_next_begins(rank, victim):
            if rank == 1:
                fifo = Path(__file__).with_name("fifo")
                threading.Thread(target=ends_when_allowed, args=[fifo], daemon=True).start()


        @distributed
        def test_killed_when_the_next_is_announced(victim):
            pass


        @distributed
        def test_after_a_kill_at_its_start():
            pass


        @distributed
        def test_retires_badly(ends_badly):
            pass


        @pytest.mark.distributed(4)
        def test_wants_all_devices():
            pass


        @distributed
        def test_ends_badly(ends_badly):
            pass


        @pytest.mark.distributed(1)
        def test_last(victim):
            pass
        """,
    )
    suite.write(
        "conftest.py",
        """
        import os
        from pathlib import Path

        import psutil
        import pytest


        def victim_dies(kill):
            try:
                process = psutil.Process(int(Path(__file__).with_name("victim").read_text()))
                if kill:
                    process.kill()
                process.wait(30)
            except psutil.NoSuchProcess:
                pass


        if "WORLD_SIZE" not in os.environ:

            def pytest_runtest_logfinish(nodeid):
                if nodeid.endswith(("test_killed_at_its_end", "test_last")):
                    victim_dies(kill=True)
                if nodeid.endswith("test_next_begins"):
                    Path(__file__).with_name("fifo").write_text("end")
                    victim_dies(kill=False)

            def pytest_runtest_logstart(nodeid):
                if nodeid.endswith("test_after_a_kill_at_its_start"):
                    victim_dies(kill=True)

            def pytest_runtest_call(item):
                if item.name == "test_unmarked":
                    victim_dies(kill=True)
        """,
    )
    os.mkfifo(suite.path / "fifo")
    run = suite.run()
    run.expect(
        {
            "test_killed_at_its_end": "PASSED",
            "test_after_that": "PASSED",
            "test_killed_before_the_next_begins": "PASSED",
            "test_unmarked": "PASSED",
            "test_next_begins": "PASSED",
            "test_killed_when_the_next_is_announced": "PASSED",
            "test_after_a_kill_at_its_start": "PASSED",
            "test_retires_badly": "PASSED",
            "test_wants_all_devices": "PASSED",
            "test_ends_badly": "PASSED ERROR",
            "test_last": "PASSED",
        }
    )
    assert "rank 0 exited with status 0 in the teardown phase" in run.failure("test_ends_badly")
    errors = re.findall(
        r"^(rank .) of a world of . (?:was )?(killed by SIG\w+|exited with status \d) ", run.text, re.MULTILINE
    )
    assert errors == [
        ("rank 1", "killed by SIGKILL"),
        ("rank 1", "killed by SIGKILL"),
        ("rank 1", "exited with status 0"),
        ("rank 1", "killed by SIGKILL"),
        ("rank 0", "exited with status 0"),
        ("rank 0", "killed by SIGKILL"),
    ]
    assert run.ret == pytest.ExitCode.TESTS_FAILED
