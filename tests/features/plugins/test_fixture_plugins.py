"""Tests of plugins with fixtures and hooks that must act on the process that runs the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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


@needs("pytest_factoryboy")
def test_factories_of_pytest_factoryboy_work_in_ranks(pair: Pair) -> None:
    pair.plugin("pytest_factoryboy.plugin")
    pair.write(
        "test_books.py",
        _HEAD
        + """
    import factory
    from pytest_factoryboy import register


    class Author:
        def __init__(self, name):
            self.name = name


    class AuthorFactory(factory.Factory):
        class Meta:
            model = Author

        name = "Ada"


    register(AuthorFactory)


    @two
    def test_passes(author):
        in_ranks()
        assert author.name == "Ada"


    @two
    def test_fails(author):
        assert not LAST


    def test_unmarked(author):
        assert author.name == "Ada"
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 2, "FAILED": 1}


@pytest.mark.parametrize("option", ["--disable-socket", "--allow-hosts=192.0.2.2"])
@needs("pytest_socket", "pytest_rerunfailures")
def test_pytest_socket_blocks_tests_but_not_process_groups(pair: Pair, option: str) -> None:
    pair.plugin("pytest_socket", "pytest_rerunfailures")
    pair.write(
        "test_network.py",
        _HEAD
        + """
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


    @two
    @pytest.mark.filterwarnings("ignore")
    def test_blocked_in_one():
        if LAST:
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
    def test_last():
        in_ranks()
    """,
    )
    marked = pair.run_marked(pair.plain.run(option), option)
    assert marked.count() == {"PASSED": 5, "FAILED": 1, "RERUN": 1}


@needs("pytest_mock", "pytest_env", "faker", "pytest_lazy_fixtures", "pytest_repeat")
def test_fixtures_and_parameters_of_plugins_work_in_ranks(pair: Pair) -> None:
    pair.plugin("pytest_mock", "pytest_env.plugin", "faker.contrib.pytest.plugin")
    pair.plugin("pytest_lazyfixture", "pytest_repeat")
    pair.ini("env =\n  SERVICE=from the ini file")
    pair.write(
        "test_fixtures.py",
        _HEAD
        + """
    from pytest_lazy_fixtures import lf

    pytestmark = two


    @pytest.fixture(params=[1, 2])
    def number(request):
        return request.param


    def test_mock_fails(mocker):
        mocked = mocker.patch("os.getlogin")
        if not LAST:
            os.getlogin()
        mocked.assert_called_once()


    def test_mock_is_undone():
        assert "mock" not in type(os.getlogin).__name__.lower()


    @pytest.mark.parametrize("value", [lf("number"), 3])
    def test_parameters(value):
        assert value in (1, 3)
        assert os.environ["SERVICE"] == "from the ini file"


    @pytest.mark.repeat(2)
    def test_faker(faker):
        with open(f"names.{os.environ.get('RANK', '1')}", "a") as file:
            print(faker.name(), file=file)
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 5, "FAILED": 2}
    # Faker has the same seed in all ranks and in the plain session.
    assert pair.plain.read("names.1") == pair.marked.read("names.0") == pair.marked.read("names.1") != []
