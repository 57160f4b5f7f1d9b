"""Tests of plugins that run coroutines as tests (pytest-asyncio, anyio)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.features.plugins.conftest import needs

if TYPE_CHECKING:
    from tests.features.plugins.conftest import Pair

_HEAD = """
    import os

    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, kind="cpu")


    def in_ranks():
        import torch.distributed as dist

        if "RANK" in os.environ:
            assert dist.get_world_size() == 2
            dist.barrier()
"""


@needs("pytest_asyncio")
def test_pytest_asyncio_runs_marked_coroutines(pair: Pair) -> None:
    pair.plugin("asyncio")  # The name of the entry point is that of a module that the fork server has imported.
    pair.ini("asyncio_default_fixture_loop_scope = function")
    pair.write(
        "test_loops.py",
        _HEAD
        + """
    import asyncio

    import pytest_asyncio


    @pytest_asyncio.fixture
    async def number():
        await asyncio.sleep(0)
        yield 7
        await asyncio.sleep(0)


    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def loop_of_the_module():
        return asyncio.get_running_loop()


    @two
    @pytest.mark.asyncio
    async def test_passes(number):
        in_ranks()
        await asyncio.sleep(0)
        assert number == 7


    @two
    @pytest.mark.asyncio
    async def test_fails(number):
        await asyncio.sleep(0)
        assert not LAST


    @two
    @pytest.mark.asyncio(loop_scope="module")
    async def test_in_the_modules_loop(loop_of_the_module):
        assert asyncio.get_running_loop() is loop_of_the_module


    @pytest.mark.asyncio
    async def test_unmarked(number):
        assert number == 7


    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 3, "FAILED": 1}


@needs("anyio", "trio")
def test_anyio_runs_coroutines_that_a_conftest_marks(pair: Pair) -> None:
    pair.plugin("anyio.pytest_plugin")
    pair.write(
        "conftest.py",
        """
        import pytest


        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.anyio)
        """,
    )
    pair.write(
        "test_backends.py",
        _HEAD
        + """
    import anyio


    @two
    async def test_passes():
        in_ranks()
        await anyio.sleep(0)
        with open(f"ran.{os.environ.get('RANK', '1')}", "a") as file:
            print("x", file=file)


    @two
    async def test_fails():
        await anyio.sleep(0)
        assert not LAST
    """,
    )
    pair.run_both()
    assert pair.plain.read("ran.1") == pair.marked.read("ran.1") == pair.marked.read("ran.0") == ["x"] * 2
