"""Debuggers in ranks, at a terminal of their own."""

from __future__ import annotations

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


class Terminal:
    """A session at a terminal, and the person before it."""

    def __init__(self, suite: Suite, *args: str, launcher: tuple[str, ...] = ()) -> None:
        suite.write("test_x.py", _TESTS)
        suite.write("pytest.ini", "[pytest]\naccel = sim:2\n")
        command = [*launcher, "-m", "pytest", "-p", "accel", "-p", "xdist", *args]
        self.child: Any = pexpect.spawn(
            sys.executable, command, cwd=str(suite.path), timeout=scaled(60), encoding="utf-8"
        )

    def see(self, text: str) -> str:
        """Wait for `text`; gives what came before it."""
        self.child.expect_exact(text)
        return str(self.child.before)

    def type(self, line: str) -> None:
        self.child.sendline(line)

    def end(self) -> str:
        """The rest of what the session says."""
        self.child.expect(pexpect.EOF)
        self.child.close()
        return str(self.child.before)


@pytest.mark.long
def test_pdb_opens_in_the_first_rank_that_fails(suite: Suite) -> None:
    terminal = Terminal(suite, "--pdb", "-k", "test_fail or short")
    assert "assert 'value of 1' == 'wrong'" in terminal.see("(Pdb) ")
    terminal.type("p value.upper()")
    terminal.see("'VALUE OF 1'")
    terminal.see("(Pdb) ")
    terminal.type("c")
    rest = terminal.end()
    assert "1 failed, 1 passed" in rest
    assert terminal.child.exitstatus == 1


@pytest.mark.long
def test_pdbcls_chooses_another_debugger(suite: Suite) -> None:
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
    terminal = Terminal(suite, "--pdb", "--pdbcls=mine:Mine", "-k", "test_fail or short")
    terminal.see("(Mine) ")
    terminal.type("p value.upper()")
    terminal.see("'VALUE OF 1'")
    terminal.see("(Mine) ")
    terminal.type("c")
    assert "1 failed, 1 passed" in terminal.end()


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
def test_the_debugger_opens_in_the_chosen_rank_only(suite: Suite, rank: int) -> None:
    terminal = Terminal(suite, "--pdb", "-k", "both", "--accel-pdb-rank", str(rank))
    assert "printed before" in terminal.see("(Pdb) ")
    terminal.type("p 'rank', rank")
    terminal.see(f"('rank', {rank})")
    terminal.see("(Pdb) ")
    terminal.type("c")
    rest = terminal.end()
    assert "(Pdb)" not in rest
    assert "1 failed" in rest


@pytest.mark.long
def test_quitting_ends_the_session(suite: Suite) -> None:
    terminal = Terminal(suite, "--pdb", "-k", "both or short")
    terminal.see("(Pdb) ")
    terminal.type("q")
    rest = terminal.end()
    assert "Exit: Quitting debugger" in rest
    assert terminal.child.exitstatus == 2


@pytest.mark.long
@pytest.mark.parametrize("options", [(), pytest.param(("-s",), marks=pytest.mark.nightly)])
def test_breakpoint_steps_and_line_editing(suite: Suite, options: tuple[str, ...]) -> None:
    terminal = Terminal(suite, "-k", "break and not everywhere", *options)
    terminal.see("PDB set_trace")
    terminal.see("(Pdb) ")
    for _ in range(2 if sys.version_info >= (3, 13) else 1):  # From there on it stops at the call itself.
        terminal.type("n")
        terminal.see("(Pdb) ")
    terminal.type("p valuX\x7fe")  # Backspace.
    terminal.see("'value of 1 and more'")
    terminal.see("(Pdb) ")
    terminal.type("\x1b[A")  # Up: the last line again.
    terminal.see("'value of 1 and more'")
    terminal.see("(Pdb) ")
    terminal.child.sendintr()
    terminal.see("KeyboardInterrupt")
    terminal.see("(Pdb) ")
    terminal.type("c")
    assert "1 passed" in terminal.end()
    assert (suite.path / "done0").exists()


@pytest.mark.nightly
def test_breakpoints_of_the_debugger(suite: Suite) -> None:
    terminal = Terminal(suite, "-k", "break and not everywhere")
    terminal.see("(Pdb) ")
    line = (suite.path / "test_x.py").read_text().splitlines().index('        value += " and more"') + 2
    terminal.type(f"b {line}")
    terminal.see("(Pdb) ")
    terminal.type("c")
    terminal.see("(Pdb) ")
    terminal.type("p value")
    terminal.see("'value of 1 and more'")
    terminal.see("(Pdb) ")
    terminal.type("c")
    assert "1 passed" in terminal.end()


@pytest.mark.nightly
def test_other_ranks_skip_their_breakpoints(suite: Suite) -> None:
    terminal = Terminal(suite, "-k", "everywhere", "--accel-pdb-rank=1")
    terminal.see("(Pdb) ")
    terminal.type("p value")
    terminal.see("'value of 1'")
    terminal.see("(Pdb) ")
    terminal.type("c")
    rest = terminal.end()
    assert "(Pdb)" not in rest
    assert "1 passed" in rest


@pytest.mark.long
def test_timeouts_stop_while_the_debugger_is_open(suite: Suite) -> None:
    terminal = Terminal(suite, "-k", "impatient")
    terminal.see("(Pdb) ")
    terminal.type("import time; time.sleep(2.5); print('th' 'ought')")
    terminal.see("thought")
    terminal.see("(Pdb) ")
    terminal.type("c")
    assert "1 passed" in terminal.end()


@pytest.mark.long
def test_trace_opens_the_debugger_at_the_start_of_the_test(suite: Suite) -> None:
    terminal = Terminal(suite, "--trace", "-k", "test_short")
    terminal.see("PDB runcall")
    terminal.see("(Pdb) ")
    terminal.type("p rank")
    terminal.see("\n0")
    terminal.see("(Pdb) ")
    terminal.type("c")
    assert "1 passed" in terminal.end()


@pytest.mark.nightly
def test_the_end_of_input_fails_the_test(suite: Suite) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run("-k", "everywhere")
    assert "bdb.BdbQuit" in run.text or "Quitting debugger" in run.text


@pytest.mark.nightly
@pytest.mark.parametrize("flag", ["--pdb", pytest.param("--trace", marks=pytest.mark.nightly)])
def test_no_debugger_in_workers(suite: Suite, flag: str) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run(flag, "-n", "1")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    assert flag in run.text + run.errors


@pytest.mark.nightly
def test_under_a_launcher(suite: Suite) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    terminal = Terminal(suite, "--pdb", "-k", "test_fail", launcher=torchrun)
    assert "assert 'value of 1' == 'wrong'" in terminal.see("(Pdb) ")
    terminal.type("p value.upper()")
    terminal.see("'VALUE OF 1'")
    terminal.see("(Pdb) ")
    terminal.type("c")
    assert "1 failed" in terminal.end()


@pytest.mark.long
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["plain", "xdist"])
def test_a_line_shows_the_progress_of_a_long_test(suite: Suite, workers: tuple[str, ...]) -> None:
    suite.write("conftest.py", "from pytest_accel.driver import world\nworld.QUIET = 0.5\n")
    terminal = Terminal(suite, "-k", "test_waits", *workers)
    terminal.see("\naccel: test_x.py::test_waits has been in its call phase for ")
    line = terminal.see("\n")
    for text in (
        "(timeout: 300 s): rank 0 at test_x.py:",
        "; rank 1 at test_x.py:",
        "rank 1 has not reached barrier #2",
    ):
        assert text in line
    (suite.path / "seen").touch()
    assert "1 passed" in terminal.end()
