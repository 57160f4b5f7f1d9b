"""Tests of sessions at a terminal: debuggers in ranks, and the line on the progress of a long test."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.deadline import scaled

if TYPE_CHECKING:
    from tests.features.conftest import Suite

pexpect = pytest.importorskip("pexpect")

_TESTS = """
    import time
    from pathlib import Path

    import pytest
    import torch.distributed as dist

    pytestmark = pytest.mark.distributed(2, device="cpu")


    def test_fail(rank):
        value = f"value of {rank}"
        if rank == 1:
            assert value == "wrong"
        dist.barrier()


    def test_both_fail(rank):
        print("printed before")
        assert rank == 7


    def test_break(rank):
        value = f"value of {rank}"
        if rank == 1:
            breakpoint()
            value += " and more"
        dist.barrier()
        Path(f"done{rank}").touch()


    def test_break_everywhere(rank):
        value = f"value of {rank}"
        breakpoint()
        dist.barrier()


    @pytest.mark.distributed(2, device="cpu", timeout=2)
    def test_impatient(rank):
        if rank == 0:
            breakpoint()
            time.sleep(0.5)  # Its clock has time for that again.
        dist.barrier()


    def test_short(rank):
        dist.barrier()


    def test_waits(rank):
        dist.barrier()
        while rank == 1 and not Path("seen").exists():
            time.sleep(0.02)
        dist.barrier()


    """
_PROGRESS_EARLY = "from pytest_accel.driver import world\nworld.QUIET = 0.5\n"


class Terminal:
    """A session at a terminal, with methods for what its user reads and types."""

    def __init__(self, suite: Suite, *args: str, launcher: tuple[str, ...] = ()) -> None:
        suite.write("test_x.py", _TESTS)
        suite.write("pytest.ini", "[pytest]\naccel = sim:2\n")
        command = [*launcher, "-m", "pytest", "-p", "accel", "-p", "xdist", *args]
        self.child: Any = pexpect.spawn(
            sys.executable, command, cwd=str(suite.path), timeout=scaled(60), encoding="utf-8"
        )

    def wait_for(self, text: str) -> str:
        """Wait for `text` in the output, and return the output before it."""
        self.child.expect_exact(text)
        return str(self.child.before)

    def type(self, line: str) -> None:
        """Send `line` and a line feed to the session."""
        self.child.sendline(line)

    def expect_progress_of_test_waits(self) -> None:
        """Wait for the line on the progress of `test_waits`, and check it."""
        self.wait_for("accel: test_x.py::test_waits has been in its call phase for ")
        line = self.wait_for("\n")
        assert "(timeout: 300 s): rank 0 at test_x.py:" in line
        assert "; rank 1 at test_x.py:" in line
        # Earlier tests of the session may have called the first barriers.
        assert (match := re.search(r"rank 1 has not reached barrier #(\d+) \(last collective: barrier #(\d+)\)", line))
        assert int(match[1]) == int(match[2]) + 1 >= 2

    def finish(self) -> str:
        """Wait until the session has ended, and return the rest of its output."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return str(self.child.before)


@pytest.mark.long
def test_pdb_opens_in_the_first_rank_that_fails_until_it_is_quit(suite: Suite) -> None:
    terminal = Terminal(suite, "-s", "--pdb", "-k", "fail or short")
    assert "assert 'value of 1' == 'wrong'" in terminal.wait_for("(Pdb) ")
    terminal.type("p value.upper()")
    terminal.wait_for("'VALUE OF 1'")
    terminal.wait_for("(Pdb) ")
    terminal.type("c")
    assert " == 7" in terminal.wait_for("(Pdb) ")  # Of either rank.
    terminal.type("q")
    rest = terminal.finish()
    assert "Exit: Quitting debugger" in rest
    assert "test_short" not in rest
    assert terminal.child.exitstatus == 2


@pytest.mark.long
def test_trace_opens_the_debugger_at_the_start_of_the_test(suite: Suite) -> None:
    terminal = Terminal(suite, "--trace", "-k", "test_short")
    terminal.wait_for("PDB runcall")
    terminal.wait_for("(Pdb) ")
    terminal.type("p rank")
    terminal.wait_for("\n0")
    terminal.wait_for("(Pdb) ")
    terminal.type("c")
    assert "1 passed" in terminal.finish()


@pytest.mark.long
def test_options_choose_the_debugger_and_its_rank(suite: Suite) -> None:
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
    terminal = Terminal(suite, "--pdb", "--pdbcls=mine:Mine", "--accel-pdb-rank=1", "-k", "both or everywhere or short")
    assert "printed before" in terminal.wait_for("(Mine) ")
    terminal.type("p 'rank', rank")
    terminal.wait_for("('rank', 1)")
    terminal.wait_for("(Mine) ")
    terminal.type("c")
    # Rank 0 has no debugger for its failure, and skips its breakpoint.
    assert "PDB set_trace" in terminal.wait_for("(Mine) ")
    terminal.type("p value")
    terminal.wait_for("'value of 1'")
    terminal.wait_for("(Mine) ")
    terminal.type("c")
    rest = terminal.finish()
    assert "(Mine)" not in rest
    assert "1 failed, 2 passed" in rest
    assert terminal.child.exitstatus == 1


@pytest.mark.long
def test_a_breakpoint_opens_a_debugger_whose_time_does_not_count(suite: Suite) -> None:
    """The debugger has line editing. Timeouts stop while it is open, and progress is shown after it."""
    suite.write("conftest.py", _PROGRESS_EARLY)
    terminal = Terminal(suite, "-k", "break and not everywhere or impatient or waits")
    terminal.wait_for("PDB set_trace")
    terminal.wait_for("(Pdb) ")
    line = (suite.path / "test_x.py").read_text().splitlines().index('        value += " and more"') + 2
    terminal.type(f"b {line}")
    terminal.wait_for("(Pdb) ")
    terminal.type("c")
    terminal.wait_for("(Pdb) ")
    terminal.type("p valuX\x7fe")  # Backspace.
    terminal.wait_for("'value of 1 and more'")
    terminal.wait_for("(Pdb) ")
    terminal.type("\x1b[A")  # Arrow up: the last line again.
    terminal.wait_for("'value of 1 and more'")
    terminal.wait_for("(Pdb) ")
    terminal.child.sendintr()
    terminal.wait_for("KeyboardInterrupt")
    terminal.wait_for("(Pdb) ")
    terminal.type("n")
    terminal.wait_for("Path(")
    terminal.wait_for("(Pdb) ")
    terminal.type("c")
    # The debugger of test_impatient is open for longer than the test's timeout.
    terminal.wait_for("PDB set_trace")
    terminal.wait_for("(Pdb) ")
    terminal.type("import time; time.sleep(2.5); print('sl' 'ept')")  # The echo of this line does not match "slept".
    terminal.wait_for("slept")
    terminal.wait_for("(Pdb) ")
    terminal.type("c")
    terminal.expect_progress_of_test_waits()
    (suite.path / "seen").touch()
    assert "3 passed" in terminal.finish()
    assert (suite.path / "done0").exists()


@pytest.mark.long
def test_the_end_of_input_fails_the_test(suite: Suite) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run("-k", "everywhere")
    assert "bdb.BdbQuit" in run.text or "Quitting debugger" in run.text
    assert run.ret != 0


@pytest.mark.long
def test_trace_is_refused_with_workers(suite: Suite) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run("--trace", "-n1", "-k", "short")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert "--trace has no terminal where xdist distributes the tests" in run.text + run.errors


@pytest.mark.long
def test_the_debugger_works_under_a_launcher(suite: Suite) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    terminal = Terminal(suite, "--pdb", "-k", "test_fail", launcher=torchrun)
    assert "assert 'value of 1' == 'wrong'" in terminal.wait_for("(Pdb) ")
    terminal.type("p value.upper()")
    terminal.wait_for("'VALUE OF 1'")
    terminal.wait_for("(Pdb) ")
    terminal.type("c")
    assert "1 failed" in terminal.finish()


@pytest.mark.long
def test_a_line_shows_the_progress_of_a_long_test_in_a_worker(suite: Suite) -> None:
    suite.write("conftest.py", _PROGRESS_EARLY)
    terminal = Terminal(suite, "-k", "test_waits", "-n1")
    terminal.expect_progress_of_test_waits()
    (suite.path / "seen").touch()
    assert "1 passed" in terminal.finish()
