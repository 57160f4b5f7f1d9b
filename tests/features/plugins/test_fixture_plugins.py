"""Tests of plugins with fixtures, parameters, coroutines and hooks that act on the process that runs the test."""

from __future__ import annotations

from tests.features.plugins.conftest import Pair, needs

_HEAD = """
    import os

    import pytest

    RANK = os.environ.get("RANK", "1")
    LAST = RANK == "1"
    two = pytest.mark.distributed(2, kind="cpu")

    def in_ranks():
        import torch.distributed as dist

        if "RANK" in os.environ:
            assert dist.get_world_size() == 2
            dist.barrier()
"""
_FIXTURES = """
    import asyncio
    import random

    import anyio
    import factory
    import pytest_asyncio
    from pytest_factoryboy import register
    from pytest_lazy_fixtures import lf

    @pytest_asyncio.fixture
    async def number():
        await asyncio.sleep(0)
        yield 7
        await asyncio.sleep(0)

    @two
    @pytest.mark.asyncio
    async def test_asyncio(number):
        in_ranks()
        await asyncio.sleep(0)
        assert number == 7

    @two
    @pytest.mark.asyncio
    async def test_asyncio_fails(number):
        await asyncio.sleep(0)
        assert not LAST

    @two
    async def test_of_anyio():
        in_ranks()
        await anyio.sleep(0)
        with open(f"ran.{RANK}", "a") as file:
            print("x", file=file)

    class Author:
        def __init__(self, name): self.name = name

    class AuthorFactory(factory.Factory):
        class Meta:
            model = Author

        name = "Ada"

    register(AuthorFactory)

    @two
    def test_factory(author): assert author.name == "Ada"

    @two
    def test_mock_fails(mocker):
        mocked = mocker.patch("os.getlogin")
        if not LAST:
            os.getlogin()
        mocked.assert_called_once()

    @pytest.fixture(params=[1, 2])
    def parameter(request): return request.param

    @two
    @pytest.mark.parametrize("value", [lf("parameter"), 3])
    def test_parameters(value):
        assert value in (1, 2, 3)
        assert os.environ["SERVICE"] == "from the ini file"

    @two
    @pytest.mark.repeat(2)
    def test_faker(faker):
        with open(f"names.{RANK}", "a") as file:
            print(faker.name(), random.random(), file=file)
"""


@needs("pytest_asyncio", "anyio", "trio", "pytest_factoryboy", "pytest_mock", "pytest_env", "faker", "pytest_randomly")
@needs("pytest_lazy_fixtures", "pytest_repeat")
def test_fixtures_parameters_and_coroutines_of_plugins_work_in_ranks(pair: Pair) -> None:
    # The name of the entry point `asyncio` is that of a module that the fork server has imported.
    pair.plugin("asyncio", "anyio.pytest_plugin", "pytest_factoryboy.plugin", "pytest_mock", "pytest_env.plugin")
    pair.plugin("faker.contrib.pytest.plugin", "pytest_lazyfixture", "pytest_repeat", "pytest_randomly")
    pair.ini("asyncio_default_fixture_loop_scope = function\nenv =\n  SERVICE=from the ini file")
    pair.write(
        "conftest.py",
        """
        import pytest

        def pytest_collection_modifyitems(items):
            for item in items:
                if item.name.startswith("test_of_anyio"):
                    item.add_marker(pytest.mark.anyio)
        """,
    )
    pair.write("test_fixtures.py", _HEAD + _FIXTURES)
    _, marked = pair.run_both("--randomly-seed=12", "--randomly-dont-reorganize")
    assert {name for name, word in marked.outcomes().items() if word == "FAILED"} == {
        *("test_asyncio_fails", "test_mock_fails")
    }
    assert marked.count()["PASSED"] >= 8
    assert pair.plain.read("ran.1") == pair.marked.read("ran.1") == pair.marked.read("ran.0") == ["x"] * 2
    # Faker and pytest-randomly have the same seed in all ranks and in the plain session.
    assert pair.plain.read("names.1") == pair.marked.read("names.0") == pair.marked.read("names.1") != []


_NETWORK = """
    import socket

    import pytest_socket

    def called(address):
        with socket.socket() as call:
            call.settimeout(1)
            call.connect(address)

    @pytest.fixture
    def own_group():
        import torch.distributed as dist

        group = dist.new_group([0, 1]) if "RANK" in os.environ else None
        yield group
        if group is not None:
            dist.destroy_process_group(group)

    @two
    def test_collectives(own_group):
        in_ranks()
        if own_group is not None:
            import torch.distributed as dist

            dist.barrier(own_group)

    BLOCKED = pytest_socket.SocketBlockedError, pytest_socket.SocketConnectBlockedError

    @two
    def test_blocked():
        in_ranks()
        with pytest.raises(BLOCKED), pytest.warns(UserWarning):
            called(("192.0.2.1", 80))

    def test_unmarked():
        with pytest.raises(BLOCKED), pytest.warns(UserWarning):
            called(("192.0.2.1", 80))

    @two
    @pytest.mark.flaky(reruns=1)
    def test_dies_once():
        if LAST and not os.path.exists("died"):
            open("died", "w").close()
            if "RANK" in os.environ:
                os._exit(3)
            raise ValueError

    @two
    def test_last(): in_ranks()
"""


@needs("pytest_socket", "pytest_rerunfailures")
def test_pytest_socket_blocks_tests_but_not_process_groups(pair: Pair) -> None:
    pair.plugin("pytest_socket", "pytest_rerunfailures")
    pair.write("test_network.py", _HEAD + _NETWORK)
    _, marked = pair.run_both("--disable-socket")
    assert marked.count() == {"PASSED": 5, "RERUN": 1}
