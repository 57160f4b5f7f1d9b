"""Tests of sessions at a terminal: debuggers in ranks, and the line on the progress of a long test."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.background_suite import PYTEST
from tests.deadline import scaled
from tests.features.conftest import Suite

pexpect = pytest.importorskip("pexpect")

_TESTS = """
    import time
    from pathlib import Path

    import pytest

    pytestmark = pytest.mark.distributed(2, kind="cpu")


    def test_fail(rank):
        import torch.distributed as dist

        value = f"value of {rank}"
        if rank == 1:
            assert value == "wrong"
        dist.barrier()


    def test_both_fail(rank):
        print("printed before")
        assert rank == 7


    def test_break(rank):
        import torch.distributed as dist

        value = f"value of {rank}"
        if rank == 1:
            breakpoint()
            value += " and more"
        dist.barrier()
        Path(f"done{rank}").touch()


    def test_break_everywhere(rank):
        import torch.distributed as dist

        value = f"value of {rank}"
        breakpoint()
        dist.barrier()


    @pytest.mark.distributed(2, kind="cpu", timeout=500)
    def test_impatient(rank):
        import torch.distributed as dist

        if rank == 0:
            breakpoint()
            time.sleep(0.5)  # The driver looks at the clock while the ranks run again.
        dist.barrier()


    def test_short(rank):
        import torch.distributed as dist

        dist.barrier()
    """
_CLOCK_JUMPS = """
    from pathlib import Path

    from pytest_accel.core.clock import monotonic
    from pytest_accel.driver import debugger_relay, rank_monitor, world


    def later():
        return monotonic() + (1000 if Path("opened").exists() else 0)


    world.monotonic = debugger_relay.monotonic = rank_monitor.monotonic = later
"""
"""A conftest.py: for the driver, 1000 seconds pass when the file ``opened`` is made."""


class Terminal:
    """A session at a terminal, with methods for what its user reads and types."""

    def __init__(self, suite: Suite, *args: str, program: tuple[str, ...] = PYTEST) -> None:
        suite.write("test_x.py", _TESTS)
        suite.write("pytest.ini", "[pytest]\naccel = sim:2\n")
        command = [*program[1:], "-p", "accel", "-p", "xdist", *args]
        self.child: Any = pexpect.spawn(program[0], command, cwd=str(suite.path), timeout=scaled(60), encoding="utf-8")

    def wait_for(self, text: str) -> str:
        """Wait for `text` in the output, and return the output before it."""
        self.child.expect_exact(text)
        return str(self.child.before)

    def type(self, line: str) -> None:
        """Send `line` and a line feed to the session."""
        self.child.sendline(line)

    def ask(self, line: str, answer: str = "", prompt: str = "(Pdb) ") -> None:
        """Type `line` in the debugger, and wait for the `answer` and the next `prompt`."""
        self.type(line)
        self.wait_for(answer)
        self.wait_for(prompt)

    def finish(self) -> str:
        """Wait until the session has ended, and return the rest of its output."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return str(self.child.before)


@pytest.mark.long
def test_pdb_opens_in_the_first_rank_that_fails_and_quitting_it_ends_the_session(suite: Suite) -> None:
    terminal = Terminal(suite, "--pdb", "-k", "test_fail or both or short")
    assert "assert 'value of 1' == 'wrong'" in terminal.wait_for("(Pdb) ")
    terminal.ask("p value.upper()", "'VALUE OF 1'")
    terminal.ask("c")
    terminal.type("q")
    rest = terminal.finish()
    assert "Exit: Quitting debugger" in rest
    assert "1 failed" in rest
    assert "passed" not in rest
    assert terminal.child.exitstatus == 2


@pytest.mark.long
def test_pdbcls_chooses_another_debugger(suite: Suite) -> None:
    """It opens in the chosen rank only. After `continue`, the session goes on with the next test."""
    suite.write(
        "mine.py",
        """
        import pdb


        class Mine(pdb.Pdb):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.prompt = "(Mine) "
        """,
    )
    terminal = Terminal(suite, "--pdb", "--pdbcls=mine:Mine", "--accel-pdb-rank=1", "-k", "both or short")
    assert "printed before" in terminal.wait_for("(Mine) ")
    terminal.ask("p 'rank', rank", "('rank', 1)", "(Mine) ")
    terminal.type("c")
    rest = terminal.finish()
    assert "(Mine)" not in rest
    assert "1 failed, 1 passed" in rest
    assert terminal.child.exitstatus == 1


@pytest.mark.long
def test_a_breakpoint_opens_a_debugger_with_line_editing(suite: Suite) -> None:
    terminal = Terminal(suite, "-k", "break and not everywhere")
    terminal.wait_for("PDB set_trace")
    terminal.wait_for("(Pdb) ")
    for _ in range(2 if sys.version_info >= (3, 13) else 1):  # pdb of 3.13 first stops at the call itself.
        terminal.ask("n")
    terminal.ask("p valuX\x7fe", "'value of 1 and more'")  # Backspace.
    terminal.ask("\x1b[A", "'value of 1 and more'")  # Arrow up: the last line again.
    terminal.child.sendintr()
    terminal.wait_for("KeyboardInterrupt")
    terminal.wait_for("(Pdb) ")
    terminal.type("c")
    assert "1 passed" in terminal.finish()
    assert (suite.path / "done0").exists()


@pytest.mark.long
def test_timeouts_stop_while_the_debugger_is_open(suite: Suite) -> None:
    suite.write("conftest.py", _CLOCK_JUMPS)
    terminal = Terminal(suite, "-k", "impatient")
    terminal.wait_for("(Pdb) ")
    terminal.ask("Path('opened').touch()")
    terminal.type("c")
    assert "1 passed" in terminal.finish()
    assert terminal.child.exitstatus == 0


@pytest.mark.long
def test_trace_opens_the_debugger_at_the_start_of_the_test(suite: Suite) -> None:
    terminal = Terminal(suite, "--trace", "-k", "test_short")
    terminal.wait_for("PDB runcall")
    terminal.wait_for("(Pdb) ")
    terminal.ask("p rank", "\n0")
    terminal.type("c")
    assert "1 passed" in terminal.finish()


@pytest.mark.long
def test_the_end_of_input_fails_the_test(suite: Suite) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run("-k", "everywhere")
    assert "bdb.BdbQuit" in run.text or "Quitting debugger" in run.text
    assert run.ret != 0


@pytest.mark.long
def test_debugger_options_are_refused_with_workers(suite: Suite) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run("--pdb", "-n", "1")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "--pdb" in run.text + run.errors
    run = suite.run("--trace", "-n", "1", "-k", "short")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    assert "--trace has no terminal where xdist distributes the tests" in run.text
