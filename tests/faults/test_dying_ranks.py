"""Tests of ranks that die during a test or after it: only that test or the session fails."""

from __future__ import annotations

import re

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

_CRASH = "        ctypes.string_at(0)"
_REDUCE = "    dist.all_reduce(torch.ones(1))"


def test_a_rank_that_dies_fails_its_test_and_its_world_is_replaced(suite: BackgroundSuite) -> None:
    """The verdict matrix has the ways in which a rank can die, and the sites."""
    suite.write(
        "test_deaths.py",
        """
        import ctypes
        import multiprocessing
        import os
        import signal

        import pytest
        from tests.lazy_torch import dist, torch

        pytestmark = pytest.mark.distributed(2)


        def kill_self():
            os.kill(os.getpid(), signal.SIGKILL)


        @pytest.fixture(scope="module")
        def tests_of_this_world():
            return []


        def test_first(tests_of_this_world, request):
            tests_of_this_world.append(request.node.name)


        def test_while_another_waits_for_it(rank):
            if rank == 0:
                kill_self()
            dist.barrier()


        def test_world_is_new(tests_of_this_world, world_size):
            assert tests_of_this_world == []
            reduce()


        def reduce():
            dist.all_reduce(torch.ones(1))


        def test_dies_after_a_collective_of_the_last_test(rank):
            if rank == 1:
                kill_self()


        def test_dies_after_a_collective(rank):
            reduce()
            if rank == 1:
                os._exit(0)


        def test_stays_as_another_program(rank):
            if rank == 1:
                os.execv("/bin/sh", ["sh", "-c", "while :; do read line || exec sleep 1000; done"])


        def test_crash(rank):
            print("before the crash of", rank)
            crash(rank)
            dist.barrier()


        def crash(rank):
            if rank == 1:
                ctypes.string_at(0)


        def test_child_crashes(rank):
            if rank == 1:
                child = os.fork()
                if child == 0:
                    ctypes.string_at(0)  # Its fault handler writes to the rank's standard error.
                os.waitpid(child, 0)
                os._exit(3)


        def test_with_a_manager(rank, gather):
            manager = multiprocessing.Manager()
            assert manager.dict().copy() == {}
            gather(rank)
            if rank == 1:
                kill_self()
            signal.pause()


        def test_last(tests_of_this_world):
            assert tests_of_this_world == []
        """,
    )
    suite.write("test_one_process.py", "import os, pytest\n@pytest.mark.devices(2)\ndef test_no_ranks(): os._exit(0)\n")
    run = suite.run(CAUSES)
    run.expect(
        {
            "test_first": "PASSED",
            "test_while_another_waits_for_it": "FAILED died: SIGKILL; rank 0",
            "test_world_is_new": "PASSED",
            "test_dies_after_a_collective_of_the_last_test": "FAILED died: SIGKILL; rank 1",
            "test_dies_after_a_collective": "FAILED died: status 0; rank 1",
            "test_stays_as_another_program": "FAILED died: unknown; rank 1",
            "test_no_ranks": "FAILED died: status 0; rank 0",
            "test_crash": "FAILED died: SIGSEGV; rank 1",
            "test_child_crashes": "FAILED died: status 3; rank 1",
            "test_with_a_manager": "FAILED died: SIGKILL; rank 1",
            "test_last": "PASSED",
        }
    )
    assert list(suite.temporary.glob("pymp-*")) == []  # The sockets of multiprocessing.
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "errors outside of any test" not in run.text
    report = run.failure("test_crash")
    lines = (suite.path / "test_deaths.py").read_text().splitlines()
    places = (f"test_deaths.py:{lines.index(line) + 1}" for line in (_CRASH, "    crash(rank)", _REDUCE))
    crash, call, reduce = places
    message = f"rank 1 was killed by SIGSEGV at {crash} in crash"
    assert f"FAILED test_deaths.py::test_crash - {message}" in run.text
    assert f"rank 1 of 2 on sim\n\n{call}: in test_crash\n    crash(rank)\n" in report
    assert f"{crash}: in crash\n    {_CRASH.strip()}\n" in report
    assert f"E   {message}\n" in report
    assert "before the crash of 1" in report
    for text in ("Extension modules", "_pytest", "pluggy", "flight_recorder", "c10d_logger.py", "Fatal Python error"):
        assert text not in report.partition("- Captured log call")[0]
    child_report = run.failure("test_child_crashes")
    assert "Fatal Python error: Segmentation fault" in child_report.partition("Captured stdout call [rank 1]")[2]
    # The place of the last collective is shown if it was in the test.
    assert "\nrank 1 was killed by SIGKILL\n" in run.failure("test_dies_after_a_collective_of_the_last_test")
    report = run.failure("test_dies_after_a_collective")
    assert f"{reduce}: in reduce\n{_REDUCE}\n" in report
    end = f"exited with status 0 before it had finished the test, after the collective at {reduce} in reduce"
    assert f"E   rank 1 {end}\n" in report


@pytest.mark.long
def test_a_rank_that_dies_after_its_test_has_passed_fails_the_session(suite: BackgroundSuite) -> None:
    suite.without_torch()
    suite.write(
        "test_it.py",
        """
        import os
        from pathlib import Path

        import pytest

        distributed = pytest.mark.distributed(2, init=False)


        @pytest.fixture
        def victim(rank, world_size):
            if rank == world_size - 1:
                Path(__file__).with_name("victim").write_text(str(os.getpid()))


        @pytest.fixture(scope="session")
        def ends_badly(rank):
            yield
            if rank == 0:
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
        def test_killed_when_the_next_is_announced(victim):
            pass


        @distributed
        def test_after_a_kill_at_its_start():
            pass


        @distributed
        def test_ends_badly(ends_badly):
            pass


        @pytest.mark.distributed(1, init=False)
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


        def victim_dies():
            process = psutil.Process(int(Path(__file__).with_name("victim").read_text()))
            process.kill()
            process.wait()


        if "WORLD_SIZE" not in os.environ:

            def pytest_runtest_logfinish(nodeid):
                if nodeid.endswith(("test_killed_at_its_end", "test_last")):
                    victim_dies()

            def pytest_runtest_logstart(nodeid):
                if nodeid.endswith("test_after_a_kill_at_its_start"):
                    victim_dies()

            def pytest_runtest_call(item):
                if item.name == "test_unmarked":
                    victim_dies()
        """,
    )
    run = suite.run(CAUSES)
    run.expect(
        {
            "test_killed_at_its_end": "PASSED",
            "test_after_that": "PASSED",
            "test_killed_before_the_next_begins": "PASSED",
            "test_unmarked": "PASSED",
            "test_killed_when_the_next_is_announced": "PASSED",
            "test_after_a_kill_at_its_start": "PASSED",
            "test_ends_badly": "PASSED ERROR died: status 0; rank 0",
            "test_last": "PASSED",
        }
    )
    killed = re.findall(r"^rank (.) of a world of . was killed by SIGKILL ", run.text, re.MULTILINE)
    assert killed == ["1", "1", "1", "0"]
    assert run.text.count(" of a world of ") == 4
    assert run.ret == pytest.ExitCode.TESTS_FAILED
