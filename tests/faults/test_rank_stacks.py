"""Tests of the stacks in failure reports: when another rank died, and when ranks hang."""

from __future__ import annotations

import re

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

pytestmark = pytest.mark.usefixtures("without_torch")


def test_a_death_and_a_hang_show_the_stacks(suite: BackgroundSuite) -> None:
    suite.write(
        "test_it.py",
        """
        import os
        import signal
        import threading

        import pytest


        def stands_here(folder, rank):
            links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
            stack = next(link for link in links if link.endswith(".stack"))
            path, size = str(folder / str(rank)), os.stat(stack).st_size
            while os.stat(stack).st_size == size: os.close(os.open(path, os.O_CREAT))


        @pytest.mark.distributed(3, init=False)
        def test_death(rank, shared_tmp_path):
            if rank == 2:
                while len(os.listdir(shared_tmp_path)) < 2:
                    pass
                os.kill(os.getpid(), signal.SIGKILL)
            stands_here(shared_tmp_path, rank)


        @pytest.mark.distributed(2, timeout=4, init=False)
        def test_hang(rank):
            if rank == 1:
                threading.Event().wait()
        """,
    )
    run = suite.run("--tb=short", CAUSES)
    run.expect({"test_death": "FAILED died: SIGKILL; rank 2", "test_hang": "FAILED hung: phase timeout; rank 1"})
    number = (suite.path / "test_it.py").read_text().splitlines().index("        threading.Event().wait()") + 1
    message = f"timed out after 4 s: rank 1 is at test_it.py:{number}; rank 0 had finished"
    assert f"FAILED test_it.py::test_hang - {message}" in run.text
    assert f"E   {message}" in run.text
    report = run.failure("test_death")
    _, _, stacks = report.partition("[ranks 0-1] stacks when another rank died")
    # The ranks create their files in the line in which they wait. The functions in it are built in and have no frames.
    line = re.escape("while os.stat(stack).st_size == size: os.close(os.open(path, os.O_CREAT))")
    assert re.search(rf"^    {line}$", stacks, re.MULTILINE)
    assert "test_it.py:13 in stands_here" in stacks
    assert "\n    stands_here(shared_tmp_path, rank)\n" in stacks
    assert "_pytest" not in stacks


def test_an_async_test_hangs_where_its_task_waits(suite: BackgroundSuite) -> None:
    pytest.importorskip("pytest_asyncio")
    suite.write(
        "test_it.py",
        """
        import asyncio
        import unittest

        import pytest

        hanging = pytest.mark.distributed(2, timeout=3, init=False)


        async def wait():
            await asyncio.Event().wait()


        async def beat():
            while True:
                await asyncio.sleep(60)


        async def hang(rank):
            task = asyncio.create_task(beat())
            if rank == 1:
                await wait()
            task.cancel()


        @hanging
        @pytest.mark.asyncio
        async def test_asyncio(rank):
            await hang(rank)


        @hanging
        class TestCase(unittest.IsolatedAsyncioTestCase):
            async def test_unittest(self):
                await hang(1)
        """,
    )
    run = suite.run("-n2", "-p", "pytest_asyncio.plugin", "-o", "asyncio_default_fixture_loop_scope=function")
    run.expect({f"test_{name}": "FAILED" for name in ("asyncio", "unittest")})
    for name, place in (
        ("test_asyncio", "rank 1 is at test_it.py:11; rank 0 had finished"),
        ("TestCase.test_unittest", "ranks 0-1 are at test_it.py:11"),
    ):
        report = run.failure(name)
        assert f"E   timed out after 3 s: {place}\n" in report
        assert re.search(r"^ +await wait\(\)$", report, re.MULTILINE)
        assert re.search(r"^ +await asyncio.Event\(\).wait\(\)$", report, re.MULTILINE)
        assert "test_it.py:16 in beat" in report.partition("stacks of other threads and tasks")[2]
