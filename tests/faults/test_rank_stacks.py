"""Tests of ranks that hang where a stack is hard to get: in an async task, or beyond the reach of signals."""

from __future__ import annotations

import re

import pytest

from tests.background_suite import BackgroundSuite
from tests.run import CAUSES

pytestmark = pytest.mark.usefixtures("without_torch")


def test_an_async_test_hangs_where_its_task_waits(suite: BackgroundSuite) -> None:
    pytest.importorskip("pytest_asyncio")
    suite.write(
        "test_it.py",
        """
        import asyncio
        import unittest

        import pytest

        hanging = pytest.mark.distributed(2, timeout=5, init=False)


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
        assert f"E   timed out after 5 s: {place}\n" in report
        assert re.search(r"^ +await wait\(\)$", report, re.MULTILINE)
        assert re.search(r"^ +await asyncio.Event\(\).wait\(\)$", report, re.MULTILINE)
        assert "test_it.py:16 in beat" in report.partition("stacks of other threads and tasks")[2]


@pytest.mark.long
def test_a_rank_that_no_signal_can_interrupt_hangs_like_others(suite: BackgroundSuite) -> None:
    suite.write(
        "test_hangs.py",
        """
        import ctypes
        import os
        import signal

        import pytest

        impatient = pytest.mark.distributed(2, timeout=6, init=False)


        @impatient
        def test_native_call_holds_the_interpreter(rank):
            if rank == 1:
                ctypes.PyDLL(None).pause()
                while True:
                    ctypes.PyDLL(None).pause()


        @impatient
        def test_stopped(rank):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)


        @impatient
        def test_deaf_to_signals(rank):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            while rank == 1:
                pass
        """,
    )
    run = suite.run("-n2", CAUSES)  # The ranks sleep most of the time.
    tests = ("test_native_call_holds_the_interpreter", "test_stopped", "test_deaf_to_signals")
    run.expect(dict.fromkeys(tests, "FAILED hung: phase timeout; rank 1"))
    assert f" in {tests[0]}\n" in run.failure(tests[0])
