"""Tests of standby processes, which are forked in advance and wait to become ranks."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable

import pytest

from pytest_accel.core.role import Role
from pytest_accel.forkserver.standby import StandbyProcesses
from tests.background_suite import BackgroundSuite

_TESTS = """
    import contextlib
    import json
    import os
    import time

    import psutil
    import pytest
    import torch
    import torch.distributed as dist


    def until(look):
        deadline = time.monotonic() + 60
        while not (found := look()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found


    def gather_pids():
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        return pids


    def record(ranks, waiting):
        with open("seen", "a") as file:
            print(json.dumps([ranks, [process.pid for process in waiting]]), file=file)


    def standby(pids):
        # They have the server's command line. Of its other children, only ranks have it, and those of earlier worlds
        # may not have exited yet.
        with open("seen") as file:
            ranks = {*pids, *(pid for line in file for pid in json.loads(line)[0])}
        server = psutil.Process(os.getppid())
        found = []
        for child in server.children():
            with contextlib.suppress(psutil.Error):  # Such as a rank that has just ended.
                if child.cmdline() == server.cmdline() and child.pid not in ranks:
                    found.append(child)
        return found if len(found) >= 2 else None


    @pytest.mark.distributed(2, device="cpu", fresh=True, env={"NCCL_SEEN": "1"})
    @pytest.mark.parametrize("number", range(4))
    def test_new(number, rank, tmp_path):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["NCCL_SEEN"]) == (str(rank), "2", "1")
        assert tmp_path.parent.name[-2:] == f"r{rank}"
        pids = gather_pids()
        if rank == 0:
            waiting = until(lambda: standby(pids)) if number in (1, 2) else []
            if number == 2:
                for process in waiting:
                    process.kill()
                until(lambda: not any(process.is_running() for process in waiting))
            record(pids, waiting)
        dist.barrier()
    """


@pytest.mark.skipif(sys.platform != "linux", reason="the test inspects processes in the way of Linux")
def test_later_ranks_come_from_standby_processes_and_dead_ones_are_replaced(suite: BackgroundSuite) -> None:
    suite.write("test_it.py", _TESTS)
    run = suite.run("--accel-timeout", "90")
    run.expect({f"test_new[{number}]": "PASSED" for number in range(4)})
    seen = [json.loads(line) for line in (suite.path / "seen").read_text().splitlines()]
    ranks, waiting = [set(pids) for pids, _ in seen], [set(pids) for _, pids in seen]
    assert ranks[2] == waiting[1]
    assert len(set.union(*ranks)) == 8
    assert len(waiting[2]) >= 2


_TESTS_THAT_STOP_STANDBY = """
    @pytest.mark.distributed(2, device="cpu", fresh=True)
    @pytest.mark.parametrize("number", range(2))
    def test_stops_those_that_wait(number, rank):
        pids = gather_pids()
        if rank == 0:
            waiting = until(lambda: standby(pids)) if number == 1 else []
            for process in waiting:
                process.suspend()
                until(lambda: process.status() == psutil.STATUS_STOPPED)
            record(pids, waiting)
        dist.barrier()


    LARGE = {f"NCCL_LARGE_{number}": 100_000 * "x" for number in range(10)}


    @pytest.mark.distributed(2, device="cpu", env=LARGE)
    def test_has_a_large_environment(rank):
        assert [os.environ[name] for name in LARGE] == list(LARGE.values())
        with open("seen") as file:
            _, (_, stopped) = map(json.loads, file)
        assert len(stopped) >= 2 and os.getpid() not in stopped


    @pytest.mark.distributed(3, device="cpu", env=LARGE)
    def test_has_it_too():
        assert [os.environ[name] for name in LARGE] == list(LARGE.values())
    """


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="there are standby processes on Linux only")
def test_stopped_standby_processes_do_not_block_other_worlds(suite: BackgroundSuite) -> None:
    """The message to a standby process is larger than a socket's buffer, so that sending it could block."""
    suite.write("test_it.py", _TESTS.partition("    @pytest.mark")[0] + _TESTS_THAT_STOP_STANDBY)
    run = suite.run("--accel-timeout", "50")
    assert set(run.outcomes().values()) == {"PASSED"}, run.text
    assert len(run.outcomes()) == 4


def test_a_standby_process_that_cannot_be_forked_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed fork is an error only if a test needs the rank."""
    attempts = []

    def fork(wait: Callable[[], Role]) -> int:
        attempts.append(wait)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    times = iter(range(1_000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(times)))
    standby = StandbyProcesses("/", fork)
    standby.prepare(4)
    standby.add_if_due()
    assert not attempts  # No standby processes yet: the first world may be the only one.
    standby.prepare(4)
    while standby.due is not None:
        standby.add_if_due()
    assert len(attempts) == 4
