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
_ASYNCIO = """
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
    """
_ANYIO = """
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
    """
_MARKED_BY_CONFTEST = """
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
    """
_CONFTEST = """
    import pytest


    def pytest_collection_modifyitems(items):
        for item in items:
            if item.path.parent.name == "by_conftest":
                item.add_marker(pytest.mark.anyio)
    """
_TRIO = """
    import trio

    pytestmark = pytest.mark.trio


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


    async def test_unmarked(number):
        assert number == 7
    """


@needs("pytest_asyncio", "anyio", "pytest_trio")
def test_asyncio_anyio_and_trio_run_marked_coroutines(pair: Pair) -> None:
    pair.plugin("pytest_asyncio.plugin", "anyio.pytest_plugin", "pytest_trio.plugin")
    pair.ini("asyncio_default_fixture_loop_scope = function")
    pair.write("test_asyncio.py", _HEAD + _ASYNCIO)
    pair.write("test_anyio.py", _HEAD + _ANYIO)
    pair.write("test_trio.py", _HEAD + _TRIO)
    pair.write("by_conftest/conftest.py", _CONFTEST)
    pair.write("by_conftest/test_marked.py", _HEAD + _MARKED_BY_CONFTEST)
    plain, marked = pair.run_both()
    assert marked.results == plain.results
    counts: dict[str, list[str]] = {}
    for name, words in marked.results.items():
        counts.setdefault(name.partition("::")[0], []).extend(words)
    assert {name: (words.count("PASSED"), words.count("FAILED"), len(words)) for name, words in counts.items()} == {
        "test_asyncio.py": (6, 1, 7),
        "test_anyio.py": (5, 1, 6),
        "test_trio.py": (2, 1, 3),
        "by_conftest/test_marked.py": (2, 2, 4),
    }
    assert pair.plain.read("ran.1") == pair.marked.read("ran.1") == pair.marked.read("ran.0") == ["x"] * 2


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
