"""Tests of plugins with one fixture, comparison or check each: results of marked and unmarked tests are equal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.other_plugins.conftest import needs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.other_plugins.conftest import Pair

_TESTS = {
    "pytest_unordered": """
        from pytest_unordered import unordered


        @ranks
        def test_unordered():
            assert [3, 1] == unordered([1, 3])


        @ranks
        def test_unordered_fails():
            assert [3, 1] == unordered([1, 4])
        """,
    "pytest_loguru.plugin": """
        from loguru import logger


        @ranks
        def test_loguru(caplog):
            logger.warning("hello")
            assert "hello" in caplog.text
        """,
    "pytest_console_scripts": """
        import sys


        @ranks
        @pytest.mark.script_launch_mode("subprocess")
        def test_script(script_runner):
            done = script_runner.run([sys.executable, "-c", "print(1)"])
            assert done.stdout == "1\\n"


        @ranks
        @pytest.mark.script_launch_mode("subprocess")
        def test_script_fails(script_runner):
            script_runner.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)
        """,
    "pytest_examples": """
        from pytest_examples import CodeExample


        @ranks
        @pytest.mark.parametrize("printed", ["1", "2"])
        def test_example(eval_example, printed):
            eval_example.run_print_check(CodeExample.create(f"print(1)\\n#> {printed}\\n"))
        """,
    "pytest_remotedata.plugin": """
        import socket


        @ranks
        @pytest.mark.remote_data
        def test_remote():
            raise AssertionError("needs --remote-data")


        @ranks
        def test_no_internet():
            with pytest.raises(OSError, match="An attempt was made to connect to the internet"):
                socket.create_connection(("192.0.2.1", 80))
        """,
    "pytest_logger.plugin": """
        import logging


        @ranks
        def test_logger():
            logging.getLogger("some").warning("hello")
        """,
    "pytest_astropy_header.display": "",
}
"""The tests of each plugin, by the plugin's module."""
_HEAD = 'import pytest\n\nranks = pytest.mark.distributed(2, device="cpu")\n'


@needs(*(name.partition(".")[0] for name in _TESTS))
def test_small_plugins_work_in_marked_tests(pair: Pair) -> None:
    pair.plugin(*_TESTS)
    pair.ini("remote_data_strict = true\nastropy_header = true")
    for module, text in _TESTS.items():
        name = module.partition(".")[0].removeprefix("pytest_")
        pair.write(f"test_{name}.py", "def test_unmarked():\n    pass\n" + _HEAD)
        for suite in (pair.plain, pair.marked):
            with (suite.path / f"test_{name}.py").open("a") as file:
                file.write(_dedented(text))
    plain = pair.plain.run("-Wdefault", "-rs")
    header = re.findall("^(?:Executable|byteorder): .*", plain.text, re.MULTILINE)
    assert len(header) == 2
    for workers in ((), ("-n1",)):
        marked = pair.marked.run("-Wdefault", "-rs", *workers)
        assert marked.results == plain.results
        assert marked.ret == plain.ret == pytest.ExitCode.TESTS_FAILED
        assert {name.rpartition("::")[2] for name, words in marked.results.items() if words != ["PASSED"]} == {
            "test_unordered_fails",
            "test_script_fails[subprocess]",
            "test_example[2]",
            "test_remote",
        }
        assert "One item replaced:" in marked.failure("test_unordered_fails")
        assert "need --remote-data option to run" in marked.text
        assert re.findall("^(?:Executable|byteorder): .*", marked.text, re.MULTILINE) == header


@needs("pytest_openfiles")
def test_openfiles_fails_marked_tests_that_leave_files_open(pair: Pair) -> None:
    pair.plugin("pytest_openfiles.plugin")
    pair.write(
        "test_it.py",
        """
        import pytest

        ranks = pytest.mark.distributed(2, device="cpu")
        OPEN = []


        @ranks
        def test_closes(tmp_path):
            with open(tmp_path / "file", "w"):
                pass


        def test_unmarked(tmp_path):
            pass


        @ranks
        def test_leaves_open(tmp_path):
            OPEN.append(open(tmp_path / "left.txt", "w"))
        """,
    )
    plain, marked = (one.run("--open-files", "-Wignore") for one in (pair.plain, pair.marked))
    assert marked.outcomes() == plain.outcomes()
    assert marked.outcomes() == {"test_closes": "PASSED", "test_leaves_open": "PASSED ERROR", "test_unmarked": "PASSED"}
    assert "left.txt" in marked.failure("test_leaves_open")


@needs("pytest_mypy", "pytest_ruff", "pytest_mypy_plugins")
def test_items_that_check_files_are_not_marked(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The items of these plugins do not get the marks of the file's tests."""
    monkeypatch.setenv("MYPY_CACHE_DIR", str(tmp_path / "mypy"))  # One cache for both sessions, since mypy is slow.
    pair.write("mypy.ini", "[mypy]\nfollow_imports = skip\n")  # mypy checks the test file, and not pytest.
    pair.plugin("pytest_mypy", "pytest_ruff", "pytest_mypy_plugins.collect")
    pair.write(
        "test_it.py",
        """
        import os

        import pytest

        pytestmark = pytest.mark.distributed(2, device="cpu")


        def test_it() -> None:
            number: int = 1
            assert number


        def test_wrong_type() -> None:
            number: int = "1"  # mypy is to find it
            assert number
        """,
    )
    pair.write(
        "test_types.yml",
        """
        - case: reveals
          main: |
            x = 1
            reveal_type(x)  # N: Revealed type is "builtins.int"
        """,
    )
    plain, marked = (one.run("--mypy", "--ruff", "-Wdefault") for one in (pair.plain, pair.marked))
    assert marked.results == plain.results
    assert marked.ret == plain.ret
    assert "F401" in marked.text
    assert "Incompatible types in assignment" in marked.text


@needs("pytest_deadfixtures", "pytest_examples")
def test_options_that_do_not_work_with_marked_tests_are_refused(pair: Pair) -> None:
    pair.plugin("pytest_deadfixtures", "pytest_examples")
    pair.marked.write("test_it.py", f"{_HEAD}\n\n@ranks\ndef test_it():\n    pass\n")
    run = pair.marked.run("--dup-fixtures", "--update-examples")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    text = run.text + run.errors
    assert "--dup-fixtures cannot compare the fixtures of marked tests, whose values are in ranks: leave it out" in text
    assert "--update-examples would have each rank of a marked test change the files" in text
    assert pair.marked.run().count() == {"PASSED": 1}


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("        ") for line in text.splitlines()) + "\n"
