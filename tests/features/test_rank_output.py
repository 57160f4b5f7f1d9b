"""Tests of the output of ranks: shown while a test runs, kept in log files, and captured for reports."""

from __future__ import annotations

import re

import pytest

from tests.features.conftest import Suite

pytestmark = pytest.mark.usefixtures("without_torch")

_TESTS = """
    import ctypes
    import os
    import sys
    from pathlib import Path

    import pytest
    from tests.inner import wait_for

    two = pytest.mark.distributed(2, kind="cpu", init=False)


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


    @pytest.fixture
    def setup_of_rank_1_ends_after_first_half(rank):
        if rank == 1:
            wait_for("first half")


    @two
    def test_setup_is_shown_during_a_line(rank, setup_of_rank_1_ends_after_first_half):
        if rank == 0:
            print("one ", end="")
            Path("first half").touch()
            wait_for("setup shown")
            print("line")


    @pytest.mark.devices(1)
    def test_alone():
        print("all alone", end="")
    """
_CONFTEST = """
    import os
    from pathlib import Path


    def pytest_runtest_logreport(report):
        if "RANK" not in os.environ and report.when == "setup" and "during" in report.nodeid:
            Path("setup shown").touch()
    """


@pytest.mark.long
def test_lines_of_ranks_have_a_prefix_and_are_not_interleaved(suite: Suite) -> None:
    suite.write("conftest.py", _CONFTEST)
    suite.write("test_x.py", _TESTS)
    run = suite.run("-s", "--accel-output", "logs")

    assert "4 passed" in run.text
    assert "===== test: " not in run.text
    logs = [path.read_text() for path in (suite.path / "logs").iterdir()]
    assert sum("===== test: test_x.py::test_c_and_no_end\npython\nfrom C\n" in text for text in logs) == 2
    assert sum("===== test: test_x.py::test_alone\nall alone" in text for text in logs) == 1
    for rank in (0, 1):
        shown = re.findall(rf"^\[rank {rank}\] (.*)$", run.text, re.MULTILINE)
        lines = []
        for number in range(300):
            lines.append(f"line {number} of {rank} {'x' * 200}")
            if number % 3 == 0:
                lines.append(f"error {number}")
        lines += ["python", "from C", "from write, unfinished"]
        assert shown == (lines if rank else [*lines, "one line"])
    assert "test_alone all alonePASSED" in run.text


def test_passed_phases_are_reported_whole_before_the_teardown_ends(suite: Suite) -> None:
    """The report of the call, for which the ranks' teardown waits, has the ranks' output and duration."""
    suite.write(
        "conftest.py",
        """
        import os
        from pathlib import Path


        def pytest_runtest_makereport(item, call):
            if "RANK" in os.environ and call.when == "call":
                Path("rank" + os.environ["RANK"]).write_text(repr(call.duration))
            if "RANK" in os.environ and call.when == "setup":
                print("from a hook between phases")


        def pytest_runtest_logreport(report):
            if "RANK" not in os.environ and report.when == "call":
                Path("reported").write_text(repr((report.outcome, report.duration, report.sections)))
        """,
    )
    suite.write(
        "test_x.py",
        """
        import pytest
        from tests.inner import wait_for


        @pytest.fixture
        def slow():
            print("from the setup")
            yield
            wait_for("reported")


        @pytest.mark.distributed(2, kind="cpu", timeout=60, init=False)
        def test_x(slow):
            print("from the call")
        """,
    )
    run = suite.run()
    assert run.count() == {"PASSED": 1}, run.text
    duration = max(float((suite.path / f"rank{rank}").read_text()) for rank in (0, 1))
    texts = {"setup": "from the setup\n", "call": "from a hook between phases\nfrom the call\n"}
    sections = [(f"Captured stdout {when} [ranks 0-1]", text) for when, text in texts.items()]
    assert (suite.path / "reported").read_text() == repr(("passed", duration, sections))


def test_captured_output_is_reported_also_of_ranks_that_die(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # With it, C holds nothing back either.
    suite.plugin("tests.late_driver")
    suite.write(
        "test_x.py",
        """
        import ctypes
        import logging
        import os
        import signal
        import subprocess
        import sys
        import threading

        import pytest
        from tests.inner import hang_here

        two = pytest.mark.distributed(2, kind="cpu", init=False)


        @pytest.fixture
        def talks(rank):
            print("out of the setup of", rank)
            logging.warning("log of the setup of %d", rank)


        @pytest.fixture
        def dies_at_its_end(rank):
            yield
            print("out of the teardown of", rank)
            if rank == 1:
                os._exit(3)


        @two
        def test_dies(talks, rank):
            print("out of", rank)
            print("err of", rank, file=sys.stderr)
            logging.warning("log of %d", rank)
            subprocess.run(["sh", "-c", f"echo child of {rank}; echo child error of {rank} >&2"], check=True)
            ctypes.CDLL(None).printf(b"native, without a line end")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


        @two
        def test_shows(capsys, rank):
            print("seen by capsys alone")
            with capsys.disabled():
                print("shown by", rank)
            assert capsys.readouterr().out == "seen by capsys alone\\n"
            os.write(2, b"binary \\xff")
            raise ValueError


        @two
        def test_hangs(rank):
            print("out of", rank)
            if rank == 1:
                hang_here()
                threading.Event().wait()


        @two
        def test_silent(rank):
            if rank == 1:
                os._exit(3)


        @two
        def test_dies_in_teardown(talks, dies_at_its_end):
            print("out of the call")


        @two
        def test_dies_after_a_flood(rank):
            for _ in range(3):
                print("x" * (1 << 20))
            if rank == 1:
                os._exit(3)
        """,
    )
    run = suite.run()
    assert run.count() == {"FAILED": 5, "PASSED": 1, "ERROR": 1}

    def captured(test: str) -> dict[str, str]:
        """Return the sections of captured output in the failure of `test`, by headline."""
        parts = re.split(r"^-+ (Captured .*?) -+\n", run.failure(test).partition("- rerun -")[0], flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    sections = captured("test_dies")
    assert [name for name in sections if "[rank 1]" in name] == [
        f"Captured {what} {when} [rank 1]" for when in ("setup", "call") for what in ("stdout", "log")
    ]
    assert "out of the setup of 1" in sections["Captured stdout setup [rank 1]"]
    assert "log of the setup of 1" in sections["Captured log setup [rank 1]"]
    text = "out of 1\nerr of 1\nchild of 1\nchild error of 1\nnative, without a line end\n"
    assert sections["Captured stdout call [rank 1]"] == text
    assert "log of 1" in sections["Captured log call [rank 1]"]
    assert "out of 1" in captured("test_hangs")["Captured stdout call [rank 1]"]
    sections = captured("test_shows")
    shown = ["shown by 1", "binary \N{REPLACEMENT CHARACTER}"]
    assert sections["Captured stdout call [rank 1]"].splitlines()[:2] == shown
    assert captured("test_silent") == {}
    sections = captured("test_dies_in_teardown")
    assert "out of the setup of 1" in sections["Captured stdout setup [rank 1]"]
    assert "out of the call" in sections["Captured stdout call [ranks 0-1]"]
    assert "out of the teardown of 1" in sections["Captured stdout teardown [rank 1]"]
    flood = captured("test_dies_after_a_flood")["Captured stdout call [ranks 0-1]"]
    assert "bytes left out" in flood
    assert len(flood) < 1 << 21
