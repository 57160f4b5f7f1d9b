"""A rank that ends in the middle of a test, in every way in which a process can end, fails that test and no other."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.worlds.conftest import Suite


def test_death_is_told_where_it_happens(suite: Suite) -> None:
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
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert "errors outside of any test" not in run.text
    said = {
        "test_sigkill": "rank 1 died in the call phase: killed by SIGKILL",
        "test_segfault": "rank 0 died in the call phase: killed by SIGSEGV",
        "test_abort": "rank 1 died in the call phase: killed by SIGABRT",
        "test_sigterm": "rank 1 died in the call phase: killed by SIGTERM",
        "test_exit_0": "rank 1 died in the call phase: exit status 0",
        "test_exit_3": "rank 0 died in the call phase: exit status 3",
        "test_all_exit_0": "ranks 0-1 died in the call phase: exit status 0",
        "test_setup": "rank 1 died in the setup phase: killed by SIGKILL",
        "test_teardown": "rank 1 died in the teardown phase: killed by SIGKILL",
        "test_while_another_waits_for_it": "rank 0 died in the call phase: killed by SIGKILL",
        "test_becomes_another_program": "rank 1 died in the call phase: exit status 0",
        "test_stays_as_another_program": "rank 1 died in the call phase: closed its connection to the driver",
        "test_sys_exit_0": "SystemExit: 0",
        "test_sys_exit_text": "SystemExit: no more",
        "test_one_of_four": "rank 2 died in the call phase: killed by SIGKILL",
        "test_three_of_four": "ranks 1-3 died in the call phase: killed by SIGKILL",
        "test_death_is_not_the_expected_failure": "rank 1 died in the call phase: killed by SIGKILL",
        "test_no_ranks": "the test's process died in the call phase: exit status 0",
    }
    for test, text in said.items():
        assert text in run.failure(test)
    assert "test_deaths.py" in run.failure("test_segfault").partition("Segmentation fault")[2], "no stack of the crash"


_PASSES = """
    import os
    import sys
    import threading
    from pathlib import Path

    import pytest

    HERE = Path(__file__).parent


    def when_idle(then):
        main = threading.main_thread().ident
        while sys._current_frames()[main].f_code.co_name != "_recv":
            pass
        then()


    @pytest.mark.distributed(2)
    def test_passes(rank):
        (HERE / f"rank-{rank}").write_text(str(os.getpid()))
        if rank == 1 and os.environ.get("BY_ITSELF"):
            threading.Thread(target=when_idle, args=[lambda: os._exit(0)], daemon=True).start()


    def test_unmarked():
        pass


    @pytest.mark.distributed(2)
    def test_next(rank):
        (HERE / f"next-{rank}").write_text(str(os.getpid()))
"""

_DRIVER = """
    import os
    import signal
    from pathlib import Path

    import psutil
    import pytest


    def rank_1_has_died(killed):
        pid = int((Path(__file__).parent / "rank-1").read_text())
        try:
            process = psutil.Process(pid)
            if killed:
                process.kill()
            process.wait(30)
        except psutil.NoSuchProcess:
            pass


    if "WORLD_SIZE" not in os.environ:
"""


@pytest.mark.parametrize(
    ("hook", "cause", "tests", "by_itself"),
    [
        pytest.param(
            "def pytest_runtest_logfinish(nodeid): 'test_passes' in nodeid and rank_1_has_died(True)",
            "killed by SIGKILL",
            "test_passes or test_next",
            "",
            id="kept for the next test",
        ),
        pytest.param(
            "def pytest_runtest_logfinish(nodeid): 'test_passes' in nodeid and rank_1_has_died(True)",
            "killed by SIGKILL",
            "test_passes",
            "",
            id="after the last test",
        ),
        pytest.param(
            "def pytest_runtest_call(item): 'test_unmarked' in item.name and rank_1_has_died(True)",
            "killed by SIGKILL",
            "test_passes or test_unmarked or test_next",
            "",
            id="idle",
        ),
        pytest.param(
            "@pytest.hookimpl(tryfirst=True)\n"
            "def pytest_runtest_teardown(item): 'test_passes' in item.name and rank_1_has_died(False)",
            "exit status 0",
            "test_passes or test_next",
            "yes",
            id="before the driver has read the end of the test",
        ),
    ],
)
def test_death_after_the_test_has_passed_fails_the_session(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, hook: str, cause: str, tests: str, by_itself: str
) -> None:
    suite.write("test_it.py", _PASSES)
    suite.write("conftest.py", _DRIVER + textwrap.indent(hook, " " * 8))
    monkeypatch.setenv("BY_ITSELF", by_itself)
    run = suite.run("-k", tests)
    run.expect(dict.fromkeys(tests.split(" or "), "PASSED"))
    assert f"rank 1 of a world of 2 died after its last test had passed ({cause})" in run.text
    assert run.code == pytest.ExitCode.TESTS_FAILED


def test_death_between_two_tests_fails_the_second(suite: Suite) -> None:
    hook = "def pytest_runtest_logstart(nodeid): 'test_next' in nodeid and rank_1_has_died(True)"
    suite.write("test_it.py", _PASSES)
    suite.write("conftest.py", _DRIVER + textwrap.indent(hook, " " * 8))
    run = suite.run("-k", "test_passes or test_next")
    run.expect({"test_passes": "PASSED", "test_next": "ERROR"})
    assert "rank 1 died in the setup phase: killed by SIGKILL" in run.failure("test_next")


def test_death_in_the_end_of_a_session_fixture_fails_the_session(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import os

        import pytest


        @pytest.fixture(scope="session")
        def ends_badly(rank):
            yield
            if rank == 0:
                os._exit(0)


        @pytest.mark.distributed(2)
        def test_passes(ends_badly):
            pass
        """,
    )
    run = suite.run()
    assert "exit status 0" in run.text
    assert run.code == pytest.ExitCode.TESTS_FAILED


def test_death_in_the_end_of_a_retired_world_fails_the_session(suite: Suite) -> None:
    """Its last test has passed long ago, and its devices are wanted for another shape."""
    suite.write(
        "test_it.py",
        """
        import os

        import pytest


        @pytest.fixture(scope="session")
        def ends_badly(rank):
            yield
            if rank == 0:
                os._exit(0)


        @pytest.mark.distributed(2)
        def test_passes(ends_badly):
            pass


        @pytest.mark.distributed(4)
        def test_wants_all_devices():
            pass


        @pytest.mark.distributed(2)
        def test_same_shape():
            pass
        """,
    )
    run = suite.run()
    run.expect(dict.fromkeys(["test_passes", "test_wants_all_devices", "test_same_shape"], "PASSED"))
    assert "rank 0 of a world of 2 failed when its session ended (exit status 0)" in run.text
    assert run.code == pytest.ExitCode.TESTS_FAILED
