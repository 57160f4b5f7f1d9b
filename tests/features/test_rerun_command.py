"""Tests of the command at the end of a failure's report, which runs the failed test again."""

from __future__ import annotations

import shlex

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_TESTS = """
    import os

    import pytest

    pytestmark = pytest.mark.distributed(2, init=False)


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


    @pytest.mark.distributed(9, init=False)
    def test_too_large():
        pass
    """


def _commands(text: str) -> list[str]:
    """Return the lines of `text` that are commands to run a test again."""
    return [line for line in text.splitlines() if line.startswith("pytest ")]


@pytest.mark.long
def test_the_command_is_shown_at_the_end_of_the_report(suite: Suite) -> None:
    suite.write("below/test_x.py", _TESTS)
    run = suite.run("--accel", "sim:3", "--accel-timeout", "70.5", "-n1")
    commands = _commands(run.text)
    assert len(commands) == 3
    assert sorted(shlex.split(command)[1] for command in commands) == [
        "below/test_x.py::test_die",
        "below/test_x.py::test_end",
        "below/test_x.py::test_of[it's]",
    ]
    assert all(command.count("--accel sim:3 --accel-timeout 70.5 --accel-ids") == 1 for command in commands)
    # The command comes last, after the captured output.
    assert run.failure("test_of[it's]").rstrip().endswith(next(line for line in commands if "test_of" in line))


@pytest.mark.long
def test_the_command_repeats_the_test_on_the_same_devices_and_is_in_junit_files(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.write("test_x.py", _TESTS)
    monkeypatch.setenv("PYTEST_ACCEL", "sim:4")
    run = suite.run("-k", "test_of or test_die", "--accel-order", "free", "--junitxml=x.xml")
    command, command_of_dead_rank = _commands(run.text)
    xml = (suite.path / "x.xml").read_text()
    assert xml.count("pytest 'test_x.py::test_of[it") == xml.count("pytest test_x.py::test_die") == 1
    assert "test_die" in command_of_dead_rank
    assert "--accel sim:4 --accel-order free" in command
    seen = [line for line in run.text.splitlines() if line.startswith("seen ")]
    monkeypatch.delenv("PYTEST_ACCEL")

    again = suite.run(*shlex.split(command)[1:])
    assert list(again.results) == ["test_x.py::test_of[it's]"]
    assert [line for line in again.text.splitlines() if line.startswith("seen ")] == seen
    assert _commands(again.text) == [command]
