"""Tests of the command at the end of a failure's report, which runs the failed test again."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.features.conftest import Suite

_TESTS = """
    import os

    import pytest

    pytestmark = pytest.mark.distributed(2)


    @pytest.mark.parametrize("text", ["it's", "b"])
    def test_of(text, rank):
        print("seen", os.environ["SIM_VISIBLE_DEVICES"])
        if rank == 1:
            assert text == "b"


    @pytest.fixture
    def broken():
        yield
        raise RuntimeError("at the end")


    def test_end(broken):
        pass


    def test_die(rank):
        if rank:
            os._exit(3)


    @pytest.mark.xfail(strict=True)
    def test_expected():
        assert False


    @pytest.mark.distributed(9)
    def test_too_large():
        pass
    """
_FAILED = ["below/test_x.py::test_die", "below/test_x.py::test_end", "below/test_x.py::test_of[it's]"]


def _commands(text: str) -> list[str]:
    """Return the lines of `text` that are commands to run a test again."""
    return [line for line in text.splitlines() if line.startswith("pytest ")]


@pytest.mark.long
def test_the_command_at_the_end_of_the_report_runs_the_test_on_the_same_devices(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.write("below/test_x.py", _TESTS)
    monkeypatch.setenv("PYTEST_ACCEL", "sim:3")
    run = suite.run("--accel-order", "free", "--accel-timeout", "70.5")
    monkeypatch.delenv("PYTEST_ACCEL")
    commands = _commands(run.text)
    assert sorted(shlex.split(command)[1] for command in commands) == _FAILED
    given = "--accel sim:3 --accel-order free --accel-timeout 70.5 --accel-devices"
    assert all(command.count(given) == 1 for command in commands)
    (command,) = (command for command in commands if "test_of" in command)
    failure = run.failure("test_of[it's]")
    assert failure.rstrip().endswith(command)  # After the captured output.
    seen = [line for line in failure.splitlines() if line.startswith("seen ")]
    assert seen

    again = suite.run(*shlex.split(command)[1:])
    assert list(again.results) == ["below/test_x.py::test_of[it's]"]
    assert [line for line in again.text.splitlines() if line.startswith("seen ")] == seen
    assert _commands(again.text) == [command]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [("--tb=line", "-n1"), ("--tb=short", "--show-capture=no", "--junitxml=x.xml")], ids=["line", "junit"]
)
def test_the_command_is_shown_once_in_other_reports(suite: Suite, options: tuple[str, ...]) -> None:
    suite.write("below/test_x.py", _TESTS)
    run = suite.run(*options)
    assert sorted(shlex.split(command)[1] for command in _commands(run.text)) == _FAILED
    if "--junitxml=x.xml" in options:
        assert (suite.path / "x.xml").read_text().count("pytest below/test_x.py::test_die") == 1
