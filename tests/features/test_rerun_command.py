"""Tests of the command at the end of a failure's report, which runs the failed test again."""

from __future__ import annotations

import re
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
def test_the_command_at_the_end_of_a_report_repeats_the_test_on_the_same_devices(
    suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite.write("below/test_x.py", _TESTS)
    monkeypatch.setenv("PYTEST_ACCEL", "sim:4")
    run = suite.run("--accel-timeout", "70.5", "--accel-order", "free", "-n1")
    commands = {shlex.split(line)[1].partition("::")[2]: line for line in _commands(run.text)}
    assert sorted(commands) == ["test_die", "test_end", "test_of[it's]"]
    assert all(
        "--accel sim:4 --accel-order free --accel-timeout 70.5 --accel-ids" in line for line in commands.values()
    )
    command = commands["test_of[it's]"]
    # The command comes last, after the captured output.
    assert run.failure("test_of[it's]").rstrip().endswith(command)
    seen = re.findall("^seen .*", run.failure("test_of[it's]"), re.MULTILINE)
    monkeypatch.delenv("PYTEST_ACCEL")

    again = suite.run(*shlex.split(command)[1:], "--junitxml=x.xml")
    assert list(again.results) == ["below/test_x.py::test_of[it's]"]
    assert re.findall("^seen .*", again.text, re.MULTILINE) == seen
    assert _commands(again.text) == [command]
    assert (suite.path / "x.xml").read_text().count("pytest 'below/test_x.py::test_of[it") == 1
