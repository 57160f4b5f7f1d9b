"""Tests of plugins with fixtures and settings that must be active in the process that runs the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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


@needs("pytest_mock", "pytest_subprocess", "pytest_env", "pytest_freezer", "faker")
def test_fixtures_of_plugins_work_in_ranks(pair: Pair) -> None:
    pair.plugin("pytest_mock", "pytest_subprocess.fixtures", "pytest_env.plugin", "pytest_freezer")
    pair.plugin("faker.contrib.pytest.plugin")
    pair.ini("env =\n  SERVICE=from the ini file")
    pair.write(
        "test_fixtures.py",
        _HEAD
        + """
    import datetime
    import subprocess

    pytestmark = two


    def test_mock(mocker):
        mocked = mocker.patch("os.getlogin", return_value="nobody")
        in_ranks()
        assert os.getlogin() == "nobody"
        mocked.assert_called_once()


    def test_mock_fails(mocker):
        mocked = mocker.patch("os.getlogin")
        if not LAST:
            os.getlogin()
        mocked.assert_called_once()


    def test_mock_is_undone():
        assert "mock" not in type(os.getlogin).__name__.lower()


    def test_subprocess(fp):
        fp.register(["git", "rev-parse"], stdout="abcdef")
        in_ranks()
        assert subprocess.check_output(["git", "rev-parse"]).strip() == b"abcdef"


    def test_subprocess_unknown(fp):
        if LAST:
            subprocess.check_output(["git", "push"])


    def test_env():
        assert os.environ["SERVICE"] == "from the ini file"


    def test_freezer(freezer):
        freezer.move_to("2020-02-29")
        in_ranks()
        assert datetime.date.today().isoformat() == "2020-02-29"


    @pytest.mark.freeze_time("2019-01-01")
    def test_freezer_mark():
        assert datetime.date.today().year == (2020 if LAST else 2019)


    def test_faker(faker):
        with open(f"names.{os.environ.get('RANK', '1')}", "a") as file:
            print(faker.name(), file=file)


    def test_unmarked(mocker, faker, freezer):
        assert mocker and faker and freezer


    test_unmarked.pytestmark = []
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 7, "FAILED": 3}
    # Faker has the same seed in all ranks and in the plain session.
    assert pair.plain.read("names.1") == pair.marked.read("names.0") == pair.marked.read("names.1") != []


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


    class Book:
        def __init__(self, title, author):
            self.title, self.author = title, author


    class AuthorFactory(factory.Factory):
        class Meta:
            model = Author

        name = "Ada"


    class BookFactory(factory.Factory):
        class Meta:
            model = Book

        title = factory.Sequence(lambda number: f"Book {number}")
        author = factory.SubFactory(AuthorFactory)


    register(AuthorFactory)
    register(BookFactory)


    @two
    def test_passes(book, author):
        in_ranks()
        assert book.author is author
        assert book.author.name == "Ada"


    @two
    @pytest.mark.parametrize("author__name", ["Grace"])
    def test_with_parameters(book):
        in_ranks()
        assert book.author.name == "Grace"


    @two
    def test_fails(book):
        assert not LAST


    def test_unmarked(book):
        assert book.author.name == "Ada"
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 3, "FAILED": 1}


@needs("pytest_httpserver")
def test_each_rank_has_its_own_http_server(pair: Pair) -> None:
    pair.plugin("pytest_httpserver.pytest_plugin")
    pair.write(
        "test_server.py",
        _HEAD
        + """
    import urllib.request


    def get(url):
        with urllib.request.urlopen(url) as answer:
            return answer.read()


    @two
    def test_passes(httpserver):
        httpserver.expect_request("/").respond_with_data("hello")
        in_ranks()
        assert get(httpserver.url_for("/")) == b"hello"
        in_ranks()


    @two
    def test_nothing_is_left_of_it(httpserver):
        httpserver.expect_request("/other").respond_with_data("hallo")
        get(httpserver.url_for("/other"))
        httpserver.check_assertions()


    @two
    def test_fails(httpserver):
        httpserver.expect_oneshot_request("/").respond_with_data("hello")
        get(httpserver.url_for("/"))
        if LAST:
            get(httpserver.url_for("/"))


    def test_unmarked(httpserver):
        httpserver.expect_request("/").respond_with_data("hello")
        assert get(httpserver.url_for("/")) == b"hello"
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 3, "FAILED": 1}


@pytest.mark.parametrize(("option", "workers"), [("--disable-socket", ()), ("--allow-hosts=192.0.2.2", ("-n1",))])
@needs("pytest_socket", "pytest_rerunfailures")
def test_pytest_socket_blocks_tests_but_not_process_groups(pair: Pair, option: str, workers: tuple[str, ...]) -> None:
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


    @two
    @pytest.mark.enable_socket
    def test_enabled():
        with socket.socket() as here:
            here.bind(("127.0.0.1", 0))
            here.listen()
            called(here.getsockname())


    @pytest.mark.distributed(3, device="cpu")
    def test_in_another_world():
        pass


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
    marked = pair.run_marked(pair.plain.run(option), option, *workers)
    assert marked.count() == {"PASSED": 7, "FAILED": 1, "RERUN": 1}


@needs("xprocess")
def test_each_rank_has_its_own_external_process(pair: Pair) -> None:
    pair.plugin("xprocess.pytest_xprocess")
    pair.write(
        "test_external.py",
        _HEAD
        + """
    import sys

    from xprocess import ProcessStarter


    @pytest.fixture(scope="module")
    def external(xprocess):
        class Starter(ProcessStarter):
            pattern = "ready"
            args = [sys.executable, "-uc", "import time; print('ready'); time.sleep(600)"]

        pid, log = xprocess.ensure("sleeper", Starter)
        yield pid
        xprocess.getinfo("sleeper").terminate()


    @two
    def test_passes(external, request):
        assert os.path.exists(f"/proc/{external}") or sys.platform != "linux"
        if "RANK" in os.environ:
            assert len(set(request.getfixturevalue("gather")(external))) == 2


    @two
    def test_fails(external):
        assert not LAST


    def test_unmarked(external):
        assert external
    """,
    )
    _, marked = pair.run_both()
    assert marked.count() == {"PASSED": 2, "FAILED": 1}
