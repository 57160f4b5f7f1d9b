"""Tests of the stacks in failure reports: when another rank died, when ranks hang, and when a rank crashes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.torch_release import needs_torch

if TYPE_CHECKING:
    from tests.background_suite import BackgroundSuite


def test_the_report_of_a_dead_rank_shows_the_stacks_of_the_other_ranks(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import signal

        import pytest


        def stands_here(folder, rank):
            links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
            stack = next(link for link in links if link.endswith(".stack"))
            path = str(folder / str(rank))
            while not os.stat(stack).st_size: os.close(os.open(path, os.O_CREAT))


        @pytest.mark.distributed(3)
        def test_death(rank, shared_tmp_path):
            if rank == 2:
                while len(os.listdir(shared_tmp_path)) < 2:
                    pass
                os.kill(os.getpid(), signal.SIGKILL)
            stands_here(shared_tmp_path, rank)
        """,
    )
    run = suite.run()
    run.expect({"test_death": "FAILED"})
    report = run.failure("test_death")
    assert "rank 2 was killed by SIGKILL" in report
    assert "ranks 0-1: passed" in report
    _, _, stacks = report.partition("[ranks 0-1] stacks at that time")
    # The ranks create their files in the line in which they wait. The functions in it are built in and have no frames.
    line = re.escape("while not os.stat(stack).st_size: os.close(os.open(path, os.O_CREAT))")
    assert re.search(rf"^> +{line}$", stacks, re.MULTILINE)
    assert "test_it.py:12 in stands_here" in stacks
    assert ">       stands_here(shared_tmp_path, rank)" in stacks
    assert "_pytest" not in stacks


@pytest.mark.long
@needs_torch(2, 8)
def test_a_hang_shows_native_frames(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import time

        import pytest
        import torch
        import torch.distributed as dist


        @pytest.mark.distributed(2, timeout=6)
        def test_hang(rank):
            if rank == 1:
                time.sleep(1000)
            dist.all_reduce(torch.ones(1))
        """,
    )
    run = suite.run()
    run.expect({"test_hang": "FAILED"})
    report = run.failure("test_hang")
    message = "timed out after 6 s: rank 1 is at test_it.py:12; rank 0 is stuck in all_reduce #1 at test_it.py:13"
    assert f"E   {message}\n\ntest_it.py:12: RankHung" in report
    assert f"FAILED test_it.py::test_hang - {message}" in run.text
    assert ">       dist.all_reduce(torch.ones(1))" in report.partition("[rank 0] stacks")[2]
    waiting, sleeping = report.partition("[rank 0] native frames")[2].split("[rank 1] native frames")
    assert "Work::wait (libtorch_cpu.so)" in waiting
    assert "all_reduce (torch/distributed/distributed_c10d.py:" in waiting
    assert "pybind11" not in waiting
    assert "nanosleep (libc.so.6)" in sleeping
    assert "test_hang (test_it.py:12)" in sleeping
    assert "_pytest" not in report.partition("- rerun -")[0]
    assert max(map(len, report.splitlines())) <= 160


def test_a_crash_shows_the_source_lines_and_the_output(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import ctypes
        import os

        import pytest
        import torch
        import torch.distributed as dist


        def crash(rank):
            if rank == 1:
                ctypes.string_at(0)


        @pytest.mark.distributed(2)
        def test_crash(rank):
            print("before the crash of", rank)
            crash(rank)
            dist.all_reduce(torch.ones(1))


        @pytest.mark.distributed(2)
        def test_child_crashes(rank):
            if rank == 1:
                child = os.fork()
                if child == 0:
                    ctypes.string_at(0)  # Its fault handler writes to the rank's log.
                os.waitpid(child, 0)
                os._exit(3)
        """,
    )
    run = suite.run()
    run.expect({"test_crash": "FAILED", "test_child_crashes": "FAILED"})
    report = run.failure("test_crash")
    message = "rank 1 was killed by SIGSEGV at test_it.py:12 in crash"
    assert f"FAILED test_it.py::test_crash - {message}" in run.text
    assert "rank 1 of 2 on sim\n\n    def test_crash(rank):\n" in report
    assert ">       crash(rank)\n\ntest_it.py:18: \n" in report
    assert ">           ctypes.string_at(0)\n\ntest_it.py:12: \n" in report
    assert f"E   {message}\n" in report
    assert "rank 1: died\nrank 0: lost its connection after rank 1 died, at test_it.py:19\n" in report
    assert "before the crash of 1" in report
    for text in ("Extension modules", "_pytest", "pluggy", "flight_recorder", "c10d_logger.py", "last output"):
        assert text not in report.partition("- Captured log call")[0]
    report = run.failure("test_child_crashes")
    assert "rank 1 exited with status 3\n" in report  # The child crashed, not the rank.
    assert "Fatal Python error: Segmentation fault" in report.partition("[rank 1] last output")[2]


@pytest.mark.long(except_for="short")
@pytest.mark.parametrize("style", ["long", "short", "line", "native", "no"])
def test_a_hang_is_shown_with_every_traceback_style(suite: BackgroundSuite, style: str) -> None:
    suite.write(
        "test_it.py",
        """
        import threading

        import pytest


        @pytest.mark.distributed(2, timeout=4)
        def test_hang(rank):
            if rank == 1:
                threading.Event().wait()
        """,
    )
    run = suite.run(f"--tb={style}")
    run.expect({"test_hang": "FAILED"})
    message = "timed out after 4 s: rank 1 is at test_it.py:10; rank 0 had finished"
    assert f"FAILED test_it.py::test_hang - {message}" in run.text
    assert (f"E   {message}" in run.text) == (style != "no")
