"""Tests of plugins that run coroutines as tests (pytest-asyncio, anyio, pytest-trio, pytest-aiohttp)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from tests.other_plugins.conftest import Pair

_HEAD = """
    import os

    import pytest

    LAST = os.environ.get("RANK", "1") == "1"
    two = pytest.mark.distributed(2, device="cpu")


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
    @pytest.mark.asyncio
    @pytest.mark.parametrize("how", [1, 2])
    async def test_with_parameters(how):
        in_ranks()


    @two
    @pytest.mark.asyncio(loop_scope="module")
    async def test_in_the_modules_loop(loop_of_the_module):
        assert asyncio.get_running_loop() is loop_of_the_module


    @pytest.mark.asyncio
    async def test_unmarked(number):
        assert number == 7


    @two
    def test_plain():
        in_ranks()
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 6, "FAILED": 1}


@needs("anyio", "trio")
def test_anyio_runs_marked_coroutines(pair: Pair) -> None:
    pair.plugin("anyio.pytest_plugin")
    pair.write(
        "test_backends.py",
        _HEAD
        + """
    import anyio
    import sniffio

    pytestmark = pytest.mark.anyio


    @pytest.fixture
    async def number():
        await anyio.sleep(0)
        yield 7
        await anyio.sleep(0)


    @two
    async def test_passes(number, anyio_backend_name):
        in_ranks()
        await anyio.sleep(0)
        assert sniffio.current_async_library() == anyio_backend_name
        assert number == 7


    @two
    async def test_fails_on_trio(anyio_backend_name):
        await anyio.sleep(0)
        assert not LAST or anyio_backend_name == "asyncio"


    async def test_unmarked(number):
        assert number == 7
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 5, "FAILED": 1}


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


@needs("pytest_trio")
def test_pytest_trio_runs_marked_coroutines(pair: Pair) -> None:
    pair.plugin("pytest_trio.plugin")
    pair.ini("trio_mode = true")
    pair.write(
        "test_nurseries.py",
        _HEAD
        + """
    import trio


    @pytest.fixture
    async def number():
        await trio.sleep(0)
        yield 7
        await trio.sleep(0)


    @two
    async def test_passes(number, nursery, autojump_clock):
        in_ranks()
        await trio.sleep(3600)
        assert number == 7


    @two
    async def test_fails(nursery):
        async def fail():
            assert not LAST

        nursery.start_soon(fail)


    @two
    def test_plain():
        in_ranks()


    async def test_unmarked(number):
        assert number == 7
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 3, "FAILED": 1}


@needs("pytest_aiohttp", "pytest_asyncio")
def test_pytest_aiohttp_runs_marked_coroutines(pair: Pair) -> None:
    pair.plugin("pytest_asyncio.plugin", "pytest_aiohttp.plugin")
    pair.ini("asyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    pair.write(
        "test_server.py",
        _HEAD
        + """
    from aiohttp import web


    async def hello(request):
        return web.Response(text="hello")


    @pytest.fixture
    def server():
        server = web.Application()
        server.router.add_get("/", hello)
        return server


    @two
    async def test_passes(server, aiohttp_client):
        in_ranks()
        answer = await (await aiohttp_client(server)).get("/")
        assert await answer.text() == "hello"


    @two
    async def test_fails(server, aiohttp_client):
        answer = await (await aiohttp_client(server)).get("/")
        assert await answer.text() == ("hallo" if LAST else "hello")


    async def test_unmarked(server, aiohttp_client):
        assert (await (await aiohttp_client(server)).get("/")).status == 200
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 2, "FAILED": 1}
