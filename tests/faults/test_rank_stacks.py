"""Tests of the stacks in failure reports when ranks hang."""

from __future__ import annotations

import re

import pytest

from tests.background_suite import BackgroundSuite

pytestmark = pytest.mark.usefixtures("without_torch")


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
