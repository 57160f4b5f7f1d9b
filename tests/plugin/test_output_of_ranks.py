"""Where the output of ranks goes: to the terminal while they run, and into files that are kept."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.plugin.conftest import Suite

_TESTS = """
    import ctypes
    import os
    import sys
    import threading

    import pytest

    two = pytest.mark.distributed(2, device="cpu")


    @two
    def test_many_lines(rank):
        for number in range(300):
            print("line", number, "of", rank, "x" * 200)
            if number % 3 == 0:
                print("error", number, file=sys.stderr)


    @two
    def test_c_and_no_end(rank):
        print("python")
        ctypes.CDLL(None).puts(b"from C")
        os.write(1, b"from write, unfinished")


    @pytest.mark.devices(1)
    def test_alone():
        print("all alone", end="")
    """


def test_lines_have_a_prefix_and_are_whole(suite: Suite) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run("-s")

    assert "3 passed" in run.text
    for rank in (0, 1):
        mine = re.findall(rf"^\[rank {rank}\] (.*)$", run.text, re.MULTILINE)
        lines = []
        for number in range(300):
            lines.append(f"line {number} of {rank} {'x' * 200}")
            if number % 3 == 0:
                lines.append(f"error {number}")
        assert [line for line in mine if "from" not in line and line != "python"] == lines
        assert mine[-3:] == ["python", "from C", "from write, unfinished"]
    assert "test_alone all alonePASSED" in run.text


def test_output_is_shown_while_the_test_runs(suite: Suite) -> None:
    """The test waits for what is done only when its output has been seen."""
    suite.write(
        "test_x.py",
        """
        import time
        from pathlib import Path

        import pytest


        @pytest.mark.distributed(2, device="cpu", timeout=60)
        def test_x(rank):
            print("here I am")
            while not Path("seen").exists():
                time.sleep(0.02)
        """,
    )
    (suite.path / "pytest.ini").write_text("[pytest]\naccel = sim:2\n")
    command = [sys.executable, "-m", "pytest", "-s", "-p", "accel"]
    with subprocess.Popen(command, cwd=suite.path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        waited_for = {"[rank 0] here I am\n", "[rank 1] here I am\n"}
        for line in process.stdout:
            waited_for.discard(line)
            if not waited_for:
                break
        (suite.path / "seen").touch()
        assert "1 passed" in process.stdout.read()
    assert process.returncode == 0


def test_a_flood_is_cut(suite: Suite) -> None:
    suite.write(
        "test_x.py",
        """
        import os

        import pytest


        @pytest.mark.distributed(2, device="cpu")
        def test_x(rank):
            if rank == 0:
                for number in range(64):
                    os.write(1, b"flood\\n" * (1 << 17))
                print("the end")
        """,
    )
    run = suite.run("-s")
    assert "1 passed" in run.text
    assert "[rank 0] the end\n" in run.text


def test_logs_are_kept(suite: Suite) -> None:
    suite.write("sub/test_x.py", _TESTS)
    suite.write(
        "test_y.py",
        "import os, pytest\n@pytest.mark.distributed(2, device='cpu')\n"
        + "def test_die(rank):\n    print('last words')\n    if rank:\n        os._exit(3)\n",
    )
    run = suite.run("--accel-logs", "logs", "-k", "no_end or die or alone")
    assert "1 failed, 2 passed" in run.text
    logs = suite.path / "logs"
    texts = {path.name: path.read_text() for path in logs.iterdir()}
    assert len(texts) == 3
    ranks = [text for text in texts.values() if "test_c_and_no_end" in text]
    assert len(ranks) == 2
    for text in ranks:
        assert re.search(
            r"===== test: sub/test_x.py::test_c_and_no_end\npython\nfrom C\nfrom write, unfinished\n"
            r"===== test: test_y.py::test_die\nlast words\n",
            text,
        )
    assert any("===== test: sub/test_x.py::test_alone\nall alone" in text for text in texts.values())
    failure = run.failure("test_die")
    assert "last words" in failure  # Which no captured output could tell of a rank that is dead.
    assert "from write" not in failure


@pytest.mark.long
def test_logs_beside_streams(suite: Suite) -> None:
    suite.write("test_x.py", _TESTS)
    run = suite.run("-s", f"--accel-logs={suite.path / 'logs'}", "-k", "no_end or alone")
    assert "[rank 1] from write, unfinished\n" in run.text
    assert "===== test: " not in run.text
    texts = [path.read_text() for path in (suite.path / "logs").iterdir()]
    assert sum("test_c_and_no_end\npython\nfrom C\n" in text for text in texts) == 2
