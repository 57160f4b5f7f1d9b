"""Tests of ranks as pytest sessions: fixtures, options and plugins work as in a session without ranks."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

# Fixtures of each scope and setup functions of each style, which log what they do.
_SCOPES = {
    "conftest.py": """
        import os
        from functools import partial

        import pytest
        from tests.inner import note


        @pytest.fixture(scope="session")
        def log():
            return partial(note, f"rank{os.environ.get('RANK', '')}.log")


        @pytest.fixture(scope="session", autouse=True)
        def of_session(log):
            log("session up")
            yield
            log("session down")


        def pytest_collection_modifyitems(items):
            if "MARKED" in os.environ:
                for item in items:
                    item.add_marker(pytest.mark.distributed(2, init=False))
        """,
    "pkg/conftest.py": """
        import pytest


        @pytest.fixture(scope="package", autouse=True)
        def of_package(log):
            log("package up")
            yield
            log("package down")


        @pytest.fixture
        def overridden():
            return "outer"


        @pytest.fixture(scope="module", params=["x", "y"])
        def letter(request, log):
            log(f"letter {request.param} up")
            yield request.param
            log(f"letter {request.param} down")
        """,
    "pkg/sub/__init__.py": "",
    "pkg/sub/conftest.py": """
        import pytest


        @pytest.fixture
        def overridden(overridden):
            return f"inner of {overridden}"
        """,
    "pkg/__init__.py": """
        import os
        from functools import partial

        from tests.inner import note

        write = partial(note, f"rank{os.environ.get('RANK', '')}.log")


        def setup_module():
            write("__init__ up")


        def teardown_module():
            write("__init__ down")
        """,
    "pkg/test_one.py": """
        import unittest

        import pytest

        from . import write


        def setup_module(module):
            write(f"setup_module {module.__name__.rpartition('.')[2]}")


        def teardown_module(module):
            write("teardown_module")


        def setup_function(function):
            write(f"setup_function {function.__name__}")


        @pytest.fixture(scope="module")
        def of_module(log):
            log("module up")
            yield
            log("module down")


        @pytest.fixture
        def of_function(log, of_module):
            log("function up")
            yield
            log("function down")


        def test_first(log, of_function):
            log("test_first")


        def test_second(log, of_function, tmp_path):
            log("test_second")


        @pytest.fixture(scope="class")
        def of_class(log):
            log("class up")
            yield
            log("class down")


        class TestClass:
            @classmethod
            def setup_class(cls):
                write(f"setup_class {cls.__name__}")

            @classmethod
            def teardown_class(cls):
                write("teardown_class")

            def setup_method(self, method):
                write(f"setup_method {method.__name__}")

            def teardown_method(self):
                write("teardown_method")

            def test_third(self, log, of_class):
                log("test_third")

            @pytest.mark.parametrize("number", [1, 2])
            def test_numbers(self, log, of_class, of_module, number):
                log(f"test_numbers {number}")


        def test_letters(log, letter):
            log(f"test_letters {letter}")


        @pytest.mark.parametrize("letter", ["p", "q"], indirect=True)
        @pytest.mark.parametrize("plain", [1])
        def test_indirect(log, letter, plain):
            log(f"test_indirect {letter} {plain}")


        class TestCase(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                write("setUpClass")

            @classmethod
            def tearDownClass(cls):
                write("tearDownClass")

            def setUp(self):
                write("setUp")

            def tearDown(self):
                write("tearDown")

            def test_case(self):
                write("test_case")
        """,
    "pkg/sub/test_two.py": """
        from .. import write


        def setup_module():
            write("setup_module of the second file")


        def test_fourth(log, overridden, letter):
            log(f"test_fourth {letter} {overridden}")
        """,
    "test_last.py": """
        def test_last(log):
            log("test_last")
        """,
}


def test_fixtures_are_set_up_and_torn_down_as_in_a_plain_session(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in _SCOPES.items():
        suite.write(name, text)
    plain = suite.run("--import-mode=importlib")
    expected = suite.read("rank.log")
    assert len(expected) == 60
    monkeypatch.setenv("MARKED", "1")
    marked = suite.run("--import-mode=importlib")
    assert plain.count() == marked.count() == {"PASSED": 13}
    assert suite.read("rank.log") == expected  # The driver has set up no fixture.
    assert suite.read("rank0.log") == expected
    assert suite.read("rank1.log") == expected


def test_an_idle_world_keeps_its_fixtures_while_another_runs_and_tears_them_down(suite: Suite) -> None:
    suite.write(
        "test_two_worlds.py",
        """
        import os

        import pytest
        from tests.inner import note


        def log(text):
            note(f"world{os.environ['WORLD_SIZE']}.{os.environ['RANK']}.log", text)


        @pytest.fixture(scope="module")
        def of_module():
            log("module up")
            yield
            log("module down")


        @pytest.fixture(scope="session")
        def of_session():
            log("session up")
            yield
            log("session down")


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_one(of_session, of_module):
            log("one")


        @pytest.mark.distributed(3, kind="cpu", init=False)
        def test_between(of_session, of_module):
            log("between")


        @pytest.mark.distributed(2, kind="cpu", init=False)
        def test_two(of_session, of_module):
            log("two")


        def test_unmarked():
            pass
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": 4}
    for rank in (0, 1):
        lines = suite.read(f"world2.{rank}.log")
        assert lines == ["session up", "module up", "one", "two", "module down", "session down"]
    assert suite.read("world3.2.log") == ["session up", "module up", "between", "module down", "session down"]


_LATE_ERRORS = """
    import pytest


    @pytest.fixture(scope="session")
    def of_session(rank):
        yield
        if rank == 1:
            raise RuntimeError("the session's end")


    @pytest.fixture(scope="module")
    def of_module(rank):
        yield
        if rank == 0:
            raise RuntimeError("the module's end")


    @pytest.mark.distributed(2, init=False)
    def test_begins(of_session, of_module):
        pass


    @pytest.mark.distributed(2, init=False)
    def test_goes_on():
        pass
    """


def test_a_rank_whose_plugins_run_no_test_has_not_passed_it(suite: Suite) -> None:
    suite.write(
        "conftest.py",
        """
        import os


        def pytest_runtest_protocol(item):
            return True if os.environ.get("RANK") == "1" and item.name != "test_runs" else None
        """,
    )
    suite.write(
        "test_it.py",
        """
        import pytest

        pytestmark = pytest.mark.distributed(2, init=False)


        def test_is_left_out():
            pass


        @pytest.mark.xfail
        def test_is_left_out_and_would_fail():
            raise ValueError


        def test_runs():
            pass
        """,
    )
    run = suite.run()
    run.expect({"test_is_left_out": "ERROR", "test_is_left_out_and_would_fail": "ERROR", "test_runs": "PASSED"})
    assert "rank 1 could not run the test: it sent no report of the setup phase" in run.failure("test_is_left_out")


@pytest.mark.long
def test_teardown_errors_of_wide_fixtures_are_reported_in_the_last_test_or_fail_the_session(suite: Suite) -> None:
    suite.write("test_a.py", _LATE_ERRORS)
    suite.write("test_b.py", "import pytest\n\n\n@pytest.mark.distributed(2, init=False)\ndef test_last():\n    pass\n")
    run = suite.run()
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.expect({"test_begins": "PASSED", "test_goes_on": "PASSED ERROR", "test_last": "PASSED ERROR"})
    assert "the module's end" in run.failure("test_goes_on")
    assert "the session's end" in run.failure("test_last")

    run = suite.run("-n1", "-k", "test_begins")  # A worker does not know that this test is the last one.
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "the module's end" in run.text
    assert "the session's end" in run.text


@pytest.mark.long
def test_a_rank_session_that_does_not_end_is_killed_and_its_stack_reported(suite: Suite) -> None:
    suite.write(
        "test_it.py",
        """
        import multiprocessing
        import threading

        import pytest

        QUEUE = multiprocessing.Queue()


        @pytest.fixture(scope="session")
        def of_session(rank):
            yield
            if rank == 1:
                threading.Event().wait()


        @pytest.mark.distributed(3, init=False)
        def test_begins(of_session, rank):
            if rank == 2:
                QUEUE.put(bytes(1 << 20))  # More than a pipe holds: multiprocessing waits until somebody reads it.
        """,
    )
    run = suite.run("-n1")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert run.count() == {"PASSED": 1}
    message = "of a world of 3 did not end its session within 10 s and was killed"
    assert re.search(rf"^rank 1 {message}; it was at \S*test_it.py:14 in of_session$", run.text, re.MULTILINE), run.text
    assert re.search(rf"^rank 2 {message}\n(.*\n)+.* in _finalize_join$", run.text, re.MULTILINE), run.text
    assert f"rank 0 {message}" not in run.text  # It has not waited for rank 1 longer than it should.


def test_ini_options_and_arguments_apply_in_ranks(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.ini(
        """
        python_files = check_*.py
        python_functions = verify_*
        pythonpath = lib
        usefixtures = everywhere
        addopts = -p no:doctest
        """
    )
    suite.write("lib/mine.py", "VALUE = 5\n")
    suite.write(
        "options/__init__.py",
        """
        import pytest


        def pytest_addoption(parser):
            parser.addoption("--color-of", default="none")
            parser.addini("weight", "kg", type="int", default=0)


        @pytest.fixture
        def everywhere(request):
            request.node.reached = True
        """,
    )
    suite.write("conftest.py", 'pytest_plugins = ["options"]\n')
    suite.write(
        "checks/check_options.py",
        """
        import mine
        import pytest


        @pytest.mark.distributed(2, init=False)
        def verify_options(request, pytestconfig, tmp_path):
            assert mine.VALUE == 5
            assert pytestconfig.args == ["check_options.py::verify_options"]
            assert str(tmp_path).startswith(str(pytestconfig.option.basetemp))
            assert request.node.reached
            assert pytestconfig.getoption("--color-of") == "red"
            assert pytestconfig.getini("weight") == 7
            assert not pytestconfig.pluginmanager.hasplugin("doctest")
            assert pytestconfig.inipath == pytestconfig.rootpath / "pytest.ini"
            assert pytestconfig.invocation_params.dir == pytestconfig.rootpath / "checks"
        """,
    )
    monkeypatch.chdir(suite.path / "checks")
    run = suite.run("--color-of=red", "-o", "weight=7", "--", "check_options.py::verify_options")
    assert run.count() == {"PASSED": 1}


def test_a_hook_that_makes_a_session_of_ranks_fail_is_reported(suite: Suite) -> None:
    """As under ``torchrun -m pytest``, where the exit status of each rank counts."""
    suite.write(
        "conftest.py",
        """
        import pytest

        RECORDED = []


        @pytest.fixture
        def record():
            return RECORDED.append


        def pytest_sessionfinish(session):
            if RECORDED:
                session.exitstatus = 1
        """,
    )
    suite.write(
        "test_it.py",
        """
        import pytest


        @pytest.mark.distributed(2, kind="cpu", fresh=True, init=False)
        def test_records(rank, record):
            if rank == 1:
                record("unexpected")


        @pytest.mark.distributed(3, kind="cpu", fresh=True, init=False)
        def test_records_and_fails(record):
            record("unexpected")
            assert 0
        """,
    )
    run = suite.run()
    run.expect({"test_records": "PASSED", "test_records_and_fails": "FAILED"})
    error = "rank 1 of a world of 2 has ended its session with a failing exit status"
    assert "accel: errors outside of any test" in run.text
    assert run.text.count(error) == run.text.count("failing exit status") == 1, run.text
